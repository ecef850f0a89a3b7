"""A host behind the port: what becomes of what it is told to serve, by the reports that it makes."""

import asyncio
from typing import Any

import pytest

from refitd.clock import SystemClock
from refitd.engine.port import Outcome, Reached, Refit, Stage, Target, Unreached, VersionFiles
from refitd.state.observer import Notifier
from refitd_client.contract.follow import Following, HostEngine, HostEngines, HostReport, HostTrialResult, OrderState
from refitd_client.contract.states import EngineState
from refitd_hosts.hub import engine as lines
from refitd_hosts.hub.engine import HostLine, RefitdEngine, of_these


class SetClock(SystemClock):
    """The monotonic clock is set by a test."""

    seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds


V1, V2 = "run~v000001", "run~v000002"
HOST = HostEngines(follower="host-1", states={EngineState.IN_SYNC: 1})


def told(order: str, desired: str | None = V2, tried: HostTrialResult | None = None, **fields: Any) -> HostReport:
    """A report of a host that has one engine and served step 1 before."""
    known = {
        "follower": "host-1",
        "upstream": "http://hub",
        "upstreams": ["http://hub"],
        "desired": desired,
        "ordered": V1,
        "serves": V1,
        "process": "p",
        "order": OrderState(order),
        "configuration": "refitd c",
        "proof": "host:c:1",
        "host": HOST,
    }
    return HostReport(told=Following(**(known | fields)), tried=tried)


BEFORE = told("served", V1)
SERVED = told("served", ordered=V2, serves=V2, proof="host:c:2")
Said = list[dict[str, str | None]]


def target(**fields: Any) -> Target:
    files = VersionFiles(version=V2, path="run/v000002", digest="d", signature="s")
    return Target(path="/root/run/v000002", label="2", files=files, **fields)


def line_of(*reports: HostReport) -> HostLine:
    """The line to a host that has made these reports."""
    line = HostLine("host-1", SystemClock(), Notifier())
    for report in reports:
        line.take(report)
    return line


async def speak(line: HostLine, reports: tuple[HostReport, ...]) -> Said:
    """Make the reports, each when the last one was looked at; what the replies to them say."""
    said: Said = []
    for report in reports:
        for _ in range(5):
            await asyncio.sleep(0)
        line.take(report)
        said.append(dict(line.serve))
    for _ in range(5):
        await asyncio.sleep(0)
    return [*said, dict(line.serve)]


async def refit(first: HostReport, *reports: HostReport, load_timeout: float = 30, **fields: Any) -> tuple[Refit, Said]:
    line = line_of(first)
    engine = RefitdEngine(line, root="/root", load_timeout=load_timeout)
    ended, said = await asyncio.gather(engine.refit(target(**fields), lambda _: None), speak(line, reports))
    return ended, said


async def test_a_host_that_serves_what_it_was_told_to_is_proved_by_its_engines_fingerprints() -> None:
    ended, said = await refit(BEFORE, told("comes"), told("comes", ordered=V2), SERVED)
    assert (ended.outcome, ended.fingerprint, ended.resumed) == (Outcome.ACK, "host:c:2", True)
    assert said[0] == said[-1] == {"run": V2}, "each reply says it"


async def test_a_report_that_was_made_before_the_reply_was_heard_decides_nothing() -> None:
    ended, _ = await refit(BEFORE, BEFORE, told("served", V1), SERVED)
    assert ended.outcome is Outcome.ACK


async def test_a_report_that_came_before_the_version_was_known_is_looked_at_again_with_what_is_known_now() -> None:
    """A hub whose root was emptied has another version of the name since: the host serves the one that it had."""
    digests = {V2: "the host's"}
    known: dict[str, str] = {}
    line = HostLine("host-1", SystemClock(), Notifier(), lambda said: of_these(said, known.get))
    line.take(told("served", ordered=V2, serves=V2, digests=digests))
    known[V2] = "the hub's"
    engine = RefitdEngine(line, root="/root", load_timeout=30)
    refused = told("served", ordered=V2, serves=V2, digests=digests, refused="the hub has another of this name")
    ended, _ = await asyncio.gather(engine.refit(target(), lambda _: None), speak(line, (refused,)))
    assert (ended.outcome, ended.reason) == (Outcome.NACK, "the hub has another of this name")
    seen = await engine.probe()
    assert isinstance(seen, Reached)
    assert seen.serves is None


async def test_while_it_pulls_its_engines_serve_on_and_what_the_host_says_meanwhile_is_heard() -> None:
    stages: list[Stage] = []
    heard: list[HostEngines] = []
    line = line_of(BEFORE)
    engine = RefitdEngine(line, root="/root")
    reports = told("comes", pulling=V2, pulled_bytes=7), told("comes"), told("comes", ordered=V2), SERVED
    ended, _ = await asyncio.gather(engine.refit(target(hears=heard.append), stages.append), speak(line, reports))
    assert stages == [Stage.PREPARE, Stage.LOAD, Stage.VERIFY]
    assert ended.timings.keys() == {"prepare", "load", "verify"}
    said = [(each.pulling, each.pulled_bytes, each.loading) for each in heard]
    assert list(dict.fromkeys(said[1:])) == [(V2, 7, None), (None, 0, None), (None, 0, V2)]
    assert said[-1] == (None, 0, None), "it serves the version"


@pytest.mark.parametrize("fields", [{"fingerprint": "host:c:9"}, {"not_fingerprint": "host:c:2"}])
async def test_a_host_whose_engines_have_other_fingerprints_is_not_believed_and_is_loaded_again(
    fields: dict[str, str],
) -> None:
    line = line_of(BEFORE)
    engine = RefitdEngine(line, root="/root", load_timeout=30)
    ended, _ = await asyncio.gather(engine.refit(target(**fields), lambda _: None), speak(line, (SERVED,)))
    assert (ended.outcome, line.again) == (Outcome.TAINTED, 0)
    again = asyncio.create_task(engine.refit(target(repairs=True), lambda _: None))
    await speak(line, (SERVED,))
    assert line.again > 0
    assert not again.done(), "that it serves the version is what it said before it heard of the load"
    await speak(line, (told("served", ordered=V2, serves=V2, proof="host:c:2", again=line.again),))
    assert (await again).outcome is Outcome.ACK


async def test_fingerprints_of_hosts_with_other_configurations_are_not_compared() -> None:
    assert (await refit(BEFORE, SERVED, fingerprint="host:d:9"))[0].outcome is Outcome.ACK


async def test_a_host_that_refuses_is_told_to_go_back_and_its_sentence_is_the_reason() -> None:
    ended, said = await refit(BEFORE, told("refused", order_reason="the disk is full"), told("served", V1))
    assert (ended.outcome, ended.reason) == (Outcome.NACK, "host-1: the disk is full")
    assert said[-1] == {"run": V1}


async def test_the_run_is_the_version_s_also_where_its_name_has_parts() -> None:
    first, second = "exp~trial-7~v000001", "exp~trial-7~v000002"
    line = line_of(told("served", first, ordered=first, serves=first))
    files = VersionFiles(version=second, path="exp/trial-7/v000002", digest="d", signature="s")
    wanted = Target(path="/root/exp/trial-7/v000002", label="2", files=files)
    refused = told("refused", second, ordered=first, serves=first, order_reason="torn")
    engine = RefitdEngine(line, root="/root")
    _, said = await asyncio.gather(engine.refit(wanted, lambda _: None), speak(line, (refused, told("served", first))))
    assert (said[0], said[-1]) == ({"exp/trial-7": second}, {"exp/trial-7": first})


async def test_a_host_that_does_not_get_back_to_what_it_served_is_tainted() -> None:
    back = told("doubtful", V1, order_reason="engine a is QUARANTINED")
    ended, _ = await refit(BEFORE, told("refused", order_reason="torn"), back)
    assert ended.outcome is Outcome.TAINTED
    assert "engine a is QUARANTINED" in (ended.reason or "")


async def test_a_host_that_makes_no_progress_is_told_to_go_back_in_the_end() -> None:
    ended, _ = await refit(told("comes", order_reason="it is pulled"), told("served", V1), load_timeout=0)
    assert ended.outcome is Outcome.NACK
    assert "made no progress" in (ended.reason or "")


async def test_a_host_that_waits_for_its_turn_to_pull_is_waited_for() -> None:
    line, clock = line_of(BEFORE), SteppedClock()
    line.clock = clock
    engine = RefitdEngine(line, root="/root", load_timeout=30)
    waiting = asyncio.create_task(engine.refit(target(), lambda _: None))
    for _ in range(10):
        await asyncio.sleep(0)
        clock.seconds += 10.0
        line.take(told("comes", pulling=V2, ahead=7))
    for report in (told("comes", ordered=V2), SERVED):
        for _ in range(5):
            await asyncio.sleep(0)
        line.take(report)
    assert (await waiting).outcome is Outcome.ACK


class SteppedClock(SystemClock):
    """Stands still unless a test moves it."""

    seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds


async def test_a_pull_that_fails_and_begins_again_all_the_time_is_given_up_for_a_newer_version() -> None:
    """The upstream may hand out the version no more: the host asks again, and each time looks as it did before."""
    clock = SetClock()
    line = HostLine("host-1", clock, Notifier())
    line.take(BEFORE)
    again = told("comes", pulling=V2, pulled_bytes=7, ahead=0), told("comes", fault="it was not pulled: 410")
    ending = asyncio.create_task(RefitdEngine(line, root="/root", load_timeout=600).refit(target(), lambda _: None))
    for report in 10 * again:
        said = await speak(line, (report,))
        if said[-1] == {"run": V1}:
            break
        clock.seconds += 10
    await speak(line, (told("served", V1),))
    ended = await ending
    assert (ended.outcome, ended.resumed) == (Outcome.NACK, True)
    assert "no progress" in (ended.reason or "")


WHY = "updates are paused there"
PAUSED = HostEngines(follower="host-1", states={EngineState.IN_SYNC: 1}, waits=WHY)


async def test_a_host_that_its_operator_has_paused_is_told_to_stay_at_once_and_that_is_no_refusal() -> None:
    pulls, held = (told("comes", order_reason=why, host=PAUSED) for why in ("it is pulled", WHY))
    ended, said = await refit(BEFORE, pulls, held, BEFORE)
    assert (ended.outcome, ended.waits, ended.resumed) == (Outcome.NACK, True, True)
    assert ended.reason == f"host-1 does not go to {V2} now: {WHY}"
    assert said[-1] == {"run": V1}
    ended, _ = await refit(BEFORE, told("refused", order_reason="torn", host=PAUSED), BEFORE)
    assert (ended.outcome, ended.waits) == (Outcome.NACK, False)


async def test_a_host_that_was_paused_when_some_of_its_engines_were_there_is_waited_for() -> None:
    there = HostEngine(id="a", state=EngineState.IN_SYNC, version=V2)
    host = HostEngines(follower="host-1", states=PAUSED.states, waits=WHY, engines=(there,))
    ended, _ = await refit(BEFORE, told("comes", ordered=V2, order_reason=WHY, host=host), SERVED)
    assert ended.outcome is Outcome.ACK


async def test_a_host_whose_contents_are_unknown_is_tainted_and_one_without_engines_that_answer_is_away() -> None:
    assert (await refit(BEFORE, told("doubtful", order_reason="lost")))[0].outcome is Outcome.TAINTED
    assert (await refit(BEFORE, told("away", order_reason="gone")))[0].outcome is Outcome.UNREACHABLE


async def test_a_host_that_obeys_a_newer_lead_says_so() -> None:
    ended, _ = await refit(BEFORE, told("served", V1, refused="the refitd of x has led with epoch 7 since"))
    assert (ended.outcome, ended.led) == (Outcome.NACK, True)
    assert "the refitd of x has led with epoch 7 since" in (ended.reason or "")


async def test_a_host_that_falls_silent_is_away_until_it_reports_and_is_not_told_the_same_when_it_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lines, "SILENT_SECONDS", 0.0)
    line = line_of(BEFORE)
    engine = RefitdEngine(line, root="/root")
    ended = await engine.refit(target(), lambda _: None)
    assert (ended.outcome, ended.resumed, line.serve) == (Outcome.UNREACHABLE, True, {})
    assert isinstance(await engine.probe(), Unreached)
    line.take(BEFORE)
    assert isinstance(await engine.probe(), Reached)


async def test_a_version_without_a_manifest_is_not_ordered() -> None:
    line = line_of(BEFORE)
    ended = await RefitdEngine(line, root="/root").refit(Target(path="/root/run/v000002", label="2"), lambda _: None)
    assert (ended.outcome, line.serve) == (Outcome.NACK, {})


async def test_a_probe_names_what_a_host_serves_as_the_reconciler_does_and_shows_its_engines() -> None:
    line = line_of(BEFORE)
    engine = RefitdEngine(line, root="/root")
    seen = await engine.probe()
    assert isinstance(seen, Reached)
    assert (seen.model_path, seen.weight_version, seen.pulls) == ("/root/run/v000001", "1", True)
    assert (seen.serves, seen.desires) == (V1, V1)
    assert seen.host is not None
    assert seen.host.count == 1
    line.take(told("away", order_reason="none of its engines answers"))
    away, never = await engine.probe(), await RefitdEngine(line_of(), root="/root").probe()
    assert isinstance(away, Unreached)
    assert away.reason == "the host host-1 reports, and none of its engines answers"
    assert isinstance(never, Unreached)
    assert never.reason is not None
    assert never.reason.startswith("the host host-1 does not report: nothing was heard of it since this service")


async def test_a_trial_is_asked_for_in_the_replies_and_answered_in_a_report() -> None:
    line = line_of(BEFORE)
    trial = asyncio.create_task(RefitdEngine(line, root="/root").trial("1"))
    await speak(line, (told("served", V1, tried=HostTrialResult(number=7, fault="of an earlier question")),))
    assert line.trial is not None
    assert line.trial.label == "1"
    await speak(line, (told("served", V1, tried=HostTrialResult(number=line.trial.number, fault="garbage")),))
    assert (await trial, line.trial) == ("garbage", None)


async def test_after_a_start_a_host_is_awaited_for_a_minute_and_then_away() -> None:
    clock = SetClock()
    clock.seconds = 1000.0
    line = HostLine("host-1", clock, Notifier())
    engine = RefitdEngine(line, root="/root")
    first = await engine.probe()
    assert isinstance(first, Unreached)
    assert first.is_awaited
    clock.seconds += lines.AWAY_SECONDS + 1
    late = await engine.probe()
    assert isinstance(late, Unreached)
    assert not late.is_awaited


async def test_a_host_that_is_silent_says_when_its_last_report_came_and_why_the_next_was_refused() -> None:
    clock = SetClock()
    line = HostLine("host-1", clock, Notifier())
    line.take(BEFORE)
    clock.seconds += lines.AWAY_SECONDS + 1
    engine = RefitdEngine(line, root="/root")
    seen = await engine.probe()
    assert isinstance(seen, Unreached)
    assert not seen.is_awaited
    assert seen.reason.startswith("the host host-1 does not report: its last report came at 2")
    line.refuse("the token is not known here")
    seen = await engine.probe()
    assert isinstance(seen, Unreached)
    assert "; a report in its name was refused at 2" in seen.reason
    assert seen.reason.endswith(": the token is not known here")
    again = await engine.probe()
    assert isinstance(again, Unreached)
    line.refuse("the token is not known here")
    assert again.reason == seen.reason, "a reason that changes each second would fill the log"
