"""Another writer is told from a restart, is not fought for ever, and is not forgotten at once."""

from dataclasses import replace

import pytest

from refitd.engine.port import Outcome, Process, Reached, Refit
from refitd.policy.contest import CALM_PROBES, WAITS, Cause, cause_of, forgiven
from refitd.policy.next_action import Agenda, Goals, Probe, RefitTo, Rest, Resume, next_action
from refitd.policy.observe import Expected, after_probe, after_refit
from refitd.state.records import EngineRecord
from refitd_client.contract.states import EngineState
from support.records import engine, version

INTERVAL = 2.0
NOW = 1000.0
SEEDED = Process(seed=7)
TIMED = Process(seed=7, started="a")
SERVES_7 = Expected(path="/root/run/v000007", label="7")
GOALS = Goals(target=version(7), wanted=version(7), loadable=version(7))
OURS = {"serving": version(7).id, "process": TIMED, "startup_path": "/base"}


def seen(path: str = "/other/v000003", label: str = "3", process: Process = TIMED, **more: str) -> Reached:
    return Reached(
        model_path=path,
        weight_version=label,
        server_version="0.5.23",
        configuration="c",
        startup_path="/base",
        process=process,
        **more,  # type: ignore[arg-type]
    )


def probed(before: EngineRecord, what: Reached, now: float = NOW) -> EngineRecord:
    return after_probe(before, what, SERVES_7, version(7).id, now, interval=INTERVAL)


def loaded(before: EngineRecord) -> EngineRecord:
    return after_refit(before, version(7).id, Refit(outcome=Outcome.ACK, resumed=True), NOW)


@pytest.mark.parametrize(
    ("known", "told", "path", "was", "cause"),
    [
        (TIMED, Process(seed=7, started="b"), "/base", EngineState.IN_SYNC, Cause.RESTARTED),
        (TIMED, Process(seed=8, started="b"), "/elsewhere", EngineState.IN_SYNC, Cause.RESTARTED),
        (SEEDED, Process(seed=8), "/base", EngineState.IN_SYNC, Cause.RESTARTED),
        (TIMED, TIMED, "/other/v000003", EngineState.IN_SYNC, Cause.ANOTHER_WRITER),
        (TIMED, TIMED, "/other/v000003", EngineState.UNREACHABLE, Cause.ANOTHER_WRITER),
        (TIMED, TIMED, "/base", EngineState.UNREACHABLE, Cause.ANOTHER_WRITER),
        (SEEDED, SEEDED, "/base", EngineState.IN_SYNC, Cause.ANOTHER_WRITER),
        (SEEDED, SEEDED, "/base", EngineState.UNREACHABLE, Cause.RESTARTED),  # the operator gives it its seed
        (SEEDED, SEEDED, "/base", EngineState.PROBING, Cause.RESTARTED),
        (Process(), Process(), "/other/v000003", EngineState.IN_SYNC, Cause.ANOTHER_WRITER),  # no start gives it that
        (Process(), Process(), "/base", EngineState.UNREACHABLE, Cause.RESTARTED),
        (Process(), Process(), "/base", EngineState.IN_SYNC, Cause.UNEXPLAINED),
        (Process(), TIMED, "/base", EngineState.IN_SYNC, Cause.UNEXPLAINED),
    ],
)
def test_a_restart_is_told_from_another_writer_by_what_the_server_tells(
    known: Process, told: Process, path: str, was: EngineState, cause: Cause
) -> None:
    assert cause_of(engine(**OURS | {"process": known, "state": was}), seen(path, "x", told)) is cause


@pytest.mark.parametrize(("target", "run"), [(None, "run"), (version(7).id, "run"), (None, None)])
def test_an_engine_that_was_never_loaded_is_not_in_sync_with_what_another_writer_loads(
    target: str | None, run: str | None
) -> None:
    """Its model or its label is not that of the last probe, and its process is the same."""
    waits = engine(run=run, process=TIMED, startup_path="/base", model_path="/base", weight_version="default")
    for path, label, says in (
        ("/other/v000003", "3", "another writer loads /other/v000003 as '3'"),
        ("/other/v000003", "default", "another writer loads /other/v000003 as 'default'"),
        ("/base", "3", "another writer has set its label: it names /base as '3'"),
    ):
        once = after_probe(waits, seen(path, label), None, target, NOW, interval=INTERVAL)
        twice = after_probe(once, seen(path, label), None, target, NOW + INTERVAL, interval=INTERVAL)
        for after in (once, twice):
            assert after.state is (EngineState.CONTESTED if target is None or run is None else EngineState.BEHIND)
        assert twice.trouble.contest == says
        assert loaded(twice).trouble.contest is None


def test_an_engine_that_was_never_loaded_may_be_restarted_with_another_model() -> None:
    waits = engine(process=TIMED, startup_path="/old", model_path="/old", weight_version="default")
    again = seen("/base", "default", Process(seed=8, started="b"))
    after = after_probe(waits, again, None, None, NOW, interval=INTERVAL)
    assert (after.state, after.trouble.contest, after.trouble.contests) == (EngineState.IN_SYNC, None, 0)


def test_a_change_in_the_same_process_is_another_writer_and_not_a_restart() -> None:
    after = probed(engine(**OURS), seen())
    assert after.reason == "another writer loads /other/v000003 as '3'"
    assert (after.serving, after.known, after.trouble.contests) == (None, True, 1)


def test_a_label_that_is_set_by_another_writer_is_called_that() -> None:
    after = probed(engine(**OURS), seen("/root/run/v000007", "8"))
    assert after.reason == "another writer has set its label: it names /root/run/v000007 as '8'"


def test_an_engine_that_restarts_is_loaded_at_once_however_often_another_writer_was_there() -> None:
    fought = engine(**OURS | {"contests": 3, "contested_at": NOW})
    after = probed(fought, seen("/base", "default", Process(seed=8, started="b")))
    assert (after.state, after.trouble.contests) == (EngineState.BEHIND, 0)
    assert "it was restarted" in (after.reason or "")


def test_another_writer_is_answered_at_once_then_after_a_wait_and_then_not_at_all() -> None:
    record, now, tries = engine(**OURS), NOW, 0
    for wait in WAITS:
        record = probed(record, seen(), now)
        assert (record.state is EngineState.CONTESTED) is (wait > 0)
        if wait:
            assert "stop the other writer (another refitd with this engine, or a trainer" in (record.reason or "")
        now += wait * INTERVAL
        record = probed(record, seen(), now)
        assert record.state is EngineState.BEHIND
        assert isinstance(next_action(record, GOALS, Agenda(probe_at=now + 1), now), RefitTo)
        record, tries = loaded(record), tries + 1
    assert tries == len(WAITS)
    record = probed(record, seen(), now)
    for _ in range(3):
        assert record.state is EngineState.CONTESTED
        assert "refitd engines resync a" in (record.reason or "")
        assert isinstance(next_action(record, GOALS, Agenda(probe_at=now + 1), now), Rest)
        now += 10 * CALM_PROBES * INTERVAL
        record = probed(record, seen(), now)
    assert isinstance(next_action(record, GOALS, Agenda(), now), Probe)


def test_an_engine_that_was_left_to_another_writer_is_loaded_once_it_restarts_or_a_resync_is_asked_for() -> None:
    left = engine(
        **OURS | {"serving": None}, state=EngineState.CONTESTED, contest="another writer", contests=9, contested_at=NOW
    )
    left = left.having(model_path="/other/v000003", weight_version="3")
    assert probed(left, seen()).state is EngineState.CONTESTED
    assert probed(left, seen("/base", "default", Process(seed=8, started="b"))).state is EngineState.BEHIND
    assert probed(forgiven(left), seen()).state is EngineState.BEHIND


def test_an_engine_that_was_left_to_another_writer_stays_so_while_it_is_out_of_sight() -> None:
    left = engine(
        **OURS | {"serving": None}, state=EngineState.PROBING, contest="another writer", contests=9, contested_at=NOW
    )
    after = probed(left.having(model_path="/other/v000003", weight_version="3"), seen())
    assert after.state is EngineState.CONTESTED


def test_another_writer_is_forgotten_after_a_while_without_one() -> None:
    fought = engine(**OURS | {"contests": 2, "contested_at": NOW})
    ours = seen("/root/run/v000007", "7")
    assert probed(fought, ours, NOW + (CALM_PROBES - 1) * INTERVAL).trouble.contests == 2
    assert probed(fought, ours, NOW + CALM_PROBES * INTERVAL).trouble.contests == 0


def test_a_server_that_tells_nothing_of_its_process_is_believed_once_and_counted_from_then_on() -> None:
    nothing = Process()
    first = probed(engine(**OURS | {"process": nothing}), seen("/base", "default", nothing))
    assert (first.state, first.trouble.contests) == (EngineState.BEHIND, 0)
    assert "tells nothing of its process" in (first.reason or "")
    record = loaded(first)
    for _ in WAITS:
        record = loaded(probed(record, seen("/base", "default", nothing), NOW + 1))
    stopped = probed(record, seen("/base", "default", nothing), NOW + 2)
    assert stopped.state is EngineState.CONTESTED
    assert "tells nothing of its process" in (stopped.reason or "")
    much_later = NOW + 3 + CALM_PROBES * INTERVAL
    calm = probed(loaded(first), seen("/root/run/v000007", "7", nothing), much_later)
    again = probed(calm, seen("/base", "default", nothing), much_later)
    assert again.trouble.contests == 0


def test_a_load_that_is_refused_in_the_name_of_another_service_is_not_tried_on_and_on() -> None:
    record, refusal = engine(**OURS | {"serving": None}), "it is led by the refitd of root /other"
    for _ in range(len(WAITS) - 1):
        record = after_refit(record, "v7", Refit(outcome=Outcome.NACK, resumed=True, reason=refusal, led=True), NOW)
        assert (record.state, record.reason, record.trouble.failures) == (EngineState.CONTESTED, refusal, 0)
    record = after_refit(record, "v7", Refit(outcome=Outcome.NACK, resumed=True, reason=refusal, led=True), NOW)
    assert probed(record, seen(), NOW + 10 * CALM_PROBES * INTERVAL).state is EngineState.CONTESTED


def test_an_engine_of_unknown_contents_that_another_service_leads_stays_unknown_and_is_not_tried_on_and_on() -> None:
    record = engine(state=EngineState.TAINTED, known=False)
    for _ in WAITS:
        assert isinstance(next_action(record, GOALS, Agenda(probe_at=NOW + 1), NOW), RefitTo)
        record = after_refit(record, "v7", Refit(outcome=Outcome.NACK, resumed=True, reason="led", led=True), NOW)
        assert (record.state, record.known, record.trouble.taints) == (EngineState.TAINTED, False, 0)
    assert isinstance(next_action(record, GOALS, Agenda(probe_at=NOW + 1), NOW), Rest)
    assert probed(record, seen()).state is EngineState.TAINTED
    back = probed(replace(record, state=EngineState.UNREACHABLE), seen())
    assert isinstance(next_action(back, GOALS, Agenda(probe_at=NOW + 1), NOW), RefitTo)


@pytest.mark.parametrize("state", [EngineState.IN_SYNC, EngineState.TAINTED])
def test_an_engine_that_another_service_leads_is_not_loaded_whatever_it_holds(state: EngineState) -> None:
    led = "it is led by the refitd of root /other"
    before = engine(**OURS | {"serving": None}, state=state, known=state is EngineState.IN_SYNC)
    record = probed(before, seen(led_by=led))
    assert record.trouble.taken == led
    assert record.known is before.known
    assert isinstance(next_action(record, GOALS, Agenda(), NOW), Probe)
    assert probed(record, seen()).state is not EngineState.CONTESTED


def test_an_engine_of_known_contents_that_is_left_to_another_writer_is_not_left_paused() -> None:
    left = engine(state=EngineState.CONTESTED, contest="another writer", contests=9, resume_owed=True)
    assert isinstance(next_action(left, GOALS, Agenda(), NOW), Resume)


def test_another_writer_in_the_middle_of_a_load_says_nothing_against_the_version() -> None:
    raced = Refit(outcome=Outcome.TAINTED, resumed=False, overwritten=True)
    record = after_refit(engine(), "v7", raced, NOW)
    assert (record.state, record.known, record.trouble.taints, record.trouble.strikes) == (
        EngineState.TAINTED,
        False,
        1,
        {},
    )
