"""What a host says of the hub that it follows: which hub, that the run has ended there, and that the hub refuses it."""

from pathlib import Path

from refitd_client.contract.states import Standing
from support.checkpoints import publish, tensors
from support.command_line import refitd
from support.hosts import RUN, hosts, until


def test_a_host_names_its_hub_and_closes_a_run_with_it(tmp_path: Path) -> None:
    """Closing at the host was refused, and the host kept three versions where its hub kept one."""
    with hosts(tmp_path) as all_:
        hub, one = all_.hub, all_.led("one")
        all_.publish(1)
        until(lambda: one.serves(1), hub, one)
        told = refitd("status", "--url", one.refitd.url).stdout
        assert f"This host follows {hub.refitd.url} as one." in " ".join(told.split())
        hub.client.close_run(RUN)
        until(lambda: [run.standing for run in one.client.overview().runs] == [Standing.CLOSED], hub, one)
        all_.publish(2)
        until(lambda: one.serves(2), hub, one)
        until(lambda: [run.standing for run in one.client.overview().runs] == [Standing.CURRENT], hub, one)


def test_a_host_whose_token_its_hub_refuses_is_troubled_and_says_so(tmp_path: Path) -> None:
    """Its run was called current, and engines were to load a version "when the hub orders it"."""
    write, follow, wrong = (tmp_path / name for name in ("write", "follow", "wrong"))
    write.write_text("a-token-that-writes-0123456789")
    follow.write_text("one:a-token-that-follows-0123456789")
    wrong.write_text("a-token-that-nobody-gave-0123456789")
    with hosts(tmp_path, "--token-file", str(write), "--followers-token-file", str(follow)) as all_:
        hub, one = all_.hub, all_.led("one", "--follow-token-file", str(wrong))
        publish(hub.root, RUN, 1, tensors(1))
        until(lambda: [run.standing for run in one.client.overview().runs] == [Standing.TROUBLED], hub, one)
        reasons = one.client.overview().runs[0].reasons
        assert any(each.startswith("The hub takes no report of this host: ") for each in reasons), reasons


def test_a_host_that_follows_itself_says_so(tmp_path: Path) -> None:
    """It said "this service is led by URL and leads no hosts: follow URL", and both were its own."""
    with hosts(tmp_path) as all_:
        mine = all_.host("mine")
        with mine.refitd:
            mine.refitd._arguments += ["--follow", mine.refitd.url]
            mine.refitd.restart()
            until(lambda: "is this service itself" in (mine.following()["fault"] or ""), mine)
