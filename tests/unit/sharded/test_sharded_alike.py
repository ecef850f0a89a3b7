"""What all ranks have to open their publishers with alike."""

from pathlib import Path

import pytest

from refitd_client.contract.naming import ROOT_NAME, SERVICE_FOLDER
from refitd_client.errors import PublishError
from refitd_client.sharded.publisher import RankSettings, require_same_settings


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
