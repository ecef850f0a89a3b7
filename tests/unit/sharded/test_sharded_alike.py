"""What all ranks have to say alike, and what they say of an error on one of them."""

from pathlib import Path

import pytest

from refitd_client.contract.naming import ROOT_NAME, SERVICE_FOLDER
from refitd_client.errors import PublishError
from refitd_client.publish.options import PublishOptions
from refitd_client.sharded.layout import ranks_named
from refitd_client.sharded.orders import Opening
from refitd_client.sharded.publisher import RankSettings, agree, require_same_settings
from refitd_client.sharded.rank_group import reason_of


def _named(root: Path, name: str) -> Path:
    """A root that has a name of the service's."""
    (root / SERVICE_FOLDER).mkdir(parents=True)
    (root / SERVICE_FOLDER / ROOT_NAME).write_text(name)
    return root


@pytest.mark.parametrize(
    ("second", "its", "firsts"),
    [
        (("root", "b", None), "run='b'", "'a': all ranks are opened with the same"),
        (("other", "a", None), "root='{folder}/other'", "'{folder}/root': all ranks are opened with one folder"),
        (("root", "a", 900), "max_shard_bytes=900", "None: all ranks are opened with the same"),
    ],
)
@pytest.mark.parametrize("are_made", [True, False])
def test_ranks_opened_with_different_settings_are_told_the_setting_and_what_two_have(
    tmp_path: Path, second: tuple[str, str, int | None], its: str, firsts: str, *, are_made: bool
) -> None:
    if are_made:
        (tmp_path / "root").mkdir()
        (tmp_path / "other").mkdir()
    name, run, most = second
    first = RankSettings.of(tmp_path / "root", "a", None)
    with pytest.raises(PublishError) as raised:
        require_same_settings([first, RankSettings.of(tmp_path / name, run, most)])
    said = f"rank 1 was opened with {its} and rank 0 with {firsts}"
    assert str(raised.value) == said.format(folder=tmp_path)


def test_a_root_that_is_mounted_at_different_places_is_one_folder(tmp_path: Path) -> None:
    """Also where a file system numbers its folders on each host anew, once a service has given the root its name."""
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "elsewhere").symlink_to(root)
    copies = [_named(tmp_path / host, "0a1b") for host in ("one", "other")]
    for one, other in ((root, tmp_path / "elsewhere"), copies):
        require_same_settings([RankSettings.of(each, "run", None) for each in (one, other)])


def test_roots_are_compared_as_ranks_see_them_and_not_as_they_write_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    require_same_settings([RankSettings.of("new", "run", None), RankSettings.of(tmp_path / "new", "run", None)])


def test_ranks_that_do_not_say_the_same_are_both_named() -> None:
    openings = [Opening(step=1, layout=0, claims=[], samples={}, durable=each) for each in ("always", "never")]
    with pytest.raises(PublishError, match="rank 1 asks for durable='never' and rank 0 for 'always'"):
        agree(openings, None, PublishOptions(), lambda: None)


ADVICE = (
    "This is typically caused by a remote worker crashing. Check the logs of the remote worker before reporting an "
    "error. GLHF! \U0001f3d6\ufe0f"
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            f"[/w/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9132. {ADVICE}",
            "Connection closed by peer [127.0.0.1]:9132",
        ),
        (
            f"[/w/gloo/pair.cc:537] Read error [::1]:17570: Connection reset by peer. {ADVICE}\nmore",
            "Read error [::1]:17570: Connection reset by peer",
        ),
        (
            "[/w/gloo/unbound_buffer.cc:78] Timed out waiting 999ms for recv operation to complete",
            "Timed out waiting 999ms for recv operation to complete",
        ),
        ("Invalid rank. It is 7", "Invalid rank. It is 7"),
        (f"[/w/pair.cc:1] {ADVICE}", "RuntimeError"),
        ("", "RuntimeError"),
    ],
)
def test_of_a_lost_connection_gloo_s_reason_is_told_and_not_its_advice(text: str, reason: str) -> None:
    assert reason_of(RuntimeError(text)) == reason


def test_ranks_are_named_as_a_sentence_names_them() -> None:
    named = [ranks_named(each) for each in ([1], [1, 0], {2: "late", 0: "gone", 1: "late"})]
    assert named == ["rank 1", "ranks 0 and 1", "ranks 0, 1 and 2"]
