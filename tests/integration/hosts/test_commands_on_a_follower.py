"""What an operator may say to a host that follows: what its upstream decides is refused, and what is its own holds."""

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from refitd_client import ConflictError
from refitd_client.contract.states import Standing, VersionState, WaitOutcome
from support.command_line import refitd
from support.hosts import PATIENCE, RUN, Host, hosts, until
from support.scripted_server import Step, answer, serve

ONE, TWO = f"{RUN}~v000001", f"{RUN}~v000002"


def refused(ask: Callable[[], object], hub: Host, do: str) -> None:
    """It is refused as a notice is, with what to do there."""
    with pytest.raises(ConflictError) as error:
        ask()
    problem = error.value.problem
    assert (problem.slug, problem.status) == ("run-followed", 409)
    assert problem.detail == f"this service follows {hub.refitd.url}: {do} there"


def saying(verdict: list[int]) -> Step:
    """A canary's check that answers with the status that is there by then."""

    def step(handler: BaseHTTPRequestHandler) -> None:
        answer(verdict[0], b"no")(handler)

    return step


def test_what_the_hub_has_rolled_back_from_and_deleted_while_a_host_was_down_is_barred_there(tmp_path: Path) -> None:
    """Else it stays the last good version there, which an engine that breaks is brought back to."""
    with hosts(tmp_path, "--keep-last", "2", "--slots", "0") as all_:
        hub, one = all_.hub, all_.follower("one", "--keep-last", "3", "--slots", "0")
        for step in (1, 2):
            all_.publish(step)
            until(lambda step=step: one.serves(step), hub, one)
        one.refitd.kill()
        hub.client.rollback(RUN, ONE)
        for step in (3, 4):
            all_.publish(step)
        until(lambda: hub.client.version(TWO).state is VersionState.DELETED, hub)
        one.refitd.start()
        until(lambda: one.serves(4) and one.client.version(TWO).barred, hub, one)


def test_what_a_host_s_own_canary_refuses_is_not_gone_to_again_before_a_resync(tmp_path: Path) -> None:
    verdict = [200]
    with hosts(tmp_path) as all_, serve(saying(verdict)) as judge:
        hub, one = all_.hub, all_.follower("one", "--strategy", "canary", "--canary-check", judge.url)
        all_.publish(1)
        until(lambda: one.serves(1), hub, one)
        assert one.client.wait(ONE, "served", PATIENCE).outcome is WaitOutcome.SERVED, "its check has been passed"
        verdict[0] = 422
        all_.publish(2)
        until(lambda: one.serves(2), hub, one)
        until(lambda: one.client.version(TWO).barred and one.serves(1), hub, one)
        hub.client.pin(ONE)
        until(lambda: one.client.version(ONE).pinned, hub, one)  # it has looked at the hub since
        assert one.client.version(TWO).barred
        assert sum(path.endswith("v000002") for path in one.engines[0].loaded) == 1
        assert "its upstream wants it: a resync of an engine tries it once more" in str(one.client.explain(TWO))
        verdict[0] = 200
        one.client.resync(one.client.engines().items[0].id)
        until(lambda: one.serves(2) and one.client.overview().runs[0].standing is Standing.CURRENT, hub, one)


def shown(host: Host, *command: str) -> str:
    """What a command prints for people, without the ends of lines."""
    done = refitd(*command, "--url", host.refitd.url)
    return " ".join((done.stdout + done.stderr).split())


def test_a_follower_that_is_paused_tells_its_hub_why_it_does_not_go_and_its_own_operator_what_waits(
    tmp_path: Path,
) -> None:
    with hosts(tmp_path) as all_:
        hub, one = all_.hub, all_.led("one")
        until(lambda: hub.client.engines().items, hub, one)
        all_.publish(1)
        assert hub.client.wait(ONE, timeout=PATIENCE).outcome is WaitOutcome.SERVED
        until(lambda: one.client.overview().runs[0].standing is Standing.CURRENT, hub, one)
        one.client.pause(RUN)
        all_.publish(2)
        since = one.client.overview().runs[0].paused_since
        paused = f"updates of {RUN} are paused on that host since {since}: refitd resume {RUN} there"
        waits = f"waits: {paused}"
        until(lambda: TWO in {each.id for each in one.client.versions().items}, hub, one)
        until(lambda: one.client.version(TWO).state is VersionState.SEALED, hub, one)
        until(lambda: hub.client.engine("one").reason == waits, hub, one)
        for command in (("status",), ("engines",), ("explain", RUN), ("explain", "one"), ("explain", TWO)):
            assert waits in shown(hub, *command), command
        assert f"waiting for: one is BEHIND ({waits})" in shown(hub, "wait", TWO, "--timeout", "0")
        own = one.client.engines().items[0]
        resumed = f"engines load it when updates are resumed here (refitd resume {RUN})"
        here = f"Step 2 is here and good: {resumed}, and {hub.refitd.url} orders it then"
        until(lambda: here in one.client.overview().runs[0].reasons, hub, one)
        for command in (("status",), ("engines",), ("explain", RUN), ("explain", own.id)):
            assert here in shown(one, *command), command
        assert f"Updates of run {RUN} are paused since {since}" in shown(one, "explain", TWO)
        one.client.resume(RUN)
        assert hub.client.wait(TWO, timeout=PATIENCE).outcome is WaitOutcome.SERVED
        until(lambda: hub.client.engine("one").reason is None, hub, one)
        assert here not in shown(one, "status")


def test_while_one_host_is_paused_another_is_the_canary_and_the_pause_is_no_verdict(tmp_path: Path) -> None:
    with hosts(tmp_path, "--strategy", "canary") as all_:
        hub, one, two = all_.hub, all_.led("one"), all_.led("two")
        until(lambda: len(hub.client.engines().items) == 2, hub, one, two)
        all_.publish(1)
        assert hub.client.wait(ONE, timeout=PATIENCE).outcome is WaitOutcome.SERVED
        until(lambda: one.client.overview().runs[0].standing is Standing.CURRENT, hub, one)
        one.client.pause(RUN)
        all_.publish(2)
        until(lambda: two.serves(2), hub, one, two)
        assert not hub.client.version(TWO).barred
        all_.publish(3)  # a newer one does not wait for it either
        until(lambda: two.serves(3), hub, one, two)
        assert one.serves(1)
        one.client.resume(RUN)
        assert hub.client.wait(f"{RUN}~v000003", timeout=PATIENCE).outcome is WaitOutcome.SERVED
        assert one.serves(3)
