"""What past updates amount to: percentiles, what failed, and for how long an engine was away."""

from typing import Any

import pytest

from refitd.observe.history import engine_past, outages, past_update, spread
from refitd.state.records import NOT_SENT, AttemptRecord
from refitd.state.version import with_making
from refitd_client.contract.history import Outage, Spread
from refitd_client.contract.manifest import DeltaFacts, Manifest, TensorsSummary
from refitd_client.contract.states import EngineState, Kind
from refitd_client.contract.wire import Event
from support.records import version

SEEN = "2026-01-01T00:00:01.000Z"


def load(engine: str = "a", *, at: str = SEEN, outcome: str | None = "ACK", **fields: Any) -> AttemptRecord:
    defaults: dict[str, Any] = {"version": "run~v000001", "timings": {"prepare": 5.0, "pause": 10.0, "load": 85.0}}
    return AttemptRecord(id=f"{engine}-{at}", engine=engine, started_at=at, outcome=outcome, **(defaults | fields))


def event(second: int, state: str | None, text: str = "") -> Event:
    data = {} if state is None else {"state": state}
    return Event(seq=second, at=f"00:00:0{second}", kind="engine", subject="a", text=text or str(state), data=data)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], None),
        ([7.0], Spread(count=1, p50=7.0, p95=7.0, most=7.0)),
        ([3.0, 1.0], Spread(count=2, p50=2.0, p95=3.0, most=3.0)),
        ([float(n) for n in range(1, 101)], Spread(count=100, p50=50.5, p95=95.0, most=100.0)),
        ([float(n) for n in range(1, 21)], Spread(count=20, p50=10.5, p95=19.0, most=20.0)),
    ],
)
def test_percentiles_are_those_of_the_nearest_rank(values: list[float], expected: Spread | None) -> None:
    assert spread(reversed(values)) == expected


def test_a_pause_counts_the_stages_in_which_an_engine_stands_still() -> None:
    found = past_update(version(1), [load("a"), load("b", timings={"prepare": 900.0, "pause": 1.0, "verify": 4.0})])
    assert found.pause == Spread(count=2, p50=50.0, p95=95.0, most=95.0)


def test_the_order_of_a_host_and_a_load_that_pauses_nothing_are_no_pause() -> None:
    """A host pulls, and its engines load, within its order, and an adapter is loaded while the engine generates."""
    host = load("host", timings={"load": 60_000.0, "verify": 1.0})
    assert past_update(version(1), [host]).pause is None
    found = past_update(version(1), [load("a"), host])
    assert found.pause == Spread(count=1, p50=95.0, p95=95.0, most=95.0)
    (past,) = engine_past("host", [host], [], more=False).loads
    assert (past.ms, past.pause) == (60_001.0, None)


def test_the_time_to_serve_begins_when_the_trainer_began_to_write() -> None:
    published = version(1, created_at=SEEN, timings={"publish": 400.0})
    found = past_update(published, [load("a"), load("b", at="2026-01-01T00:00:01.500Z")])
    assert found.served == Spread(count=2, p50=750.0, p95=1000.0, most=1000.0)


def test_a_version_from_memory_is_known_before_it_is_written() -> None:
    found = past_update(version(1, created_at=SEEN, handed=True, timings={"publish": 400.0}), [load()])
    assert (found.kind, found.served) == (Kind.HANDOVER, Spread(count=1, p50=100.0, p95=100.0, most=100.0))


def test_an_engine_that_comes_back_later_and_one_that_is_loaded_again_do_not_lengthen_the_update() -> None:
    served = version(1, created_at=SEEN, served_at="2026-01-01T00:00:02.000Z")
    late = [load("away", at="2026-01-01T09:00:00.000Z"), load("a", at="2026-01-01T00:00:01.900Z")]
    found = past_update(served, [load("a"), *late])
    assert found.served == Spread(count=1, p50=100.0, p95=100.0, most=100.0)
    assert (found.loads, found.done) == (3, {"full": 3})


def test_failures_are_counted_by_outcome_and_what_was_taken_by_what_was_loaded() -> None:
    loads = [
        load(kind=Kind.DELTA),
        load("b", kind=Kind.FULL),
        load("c", outcome="NACK"),
        load("d", outcome="TAINTED"),
        load("e", outcome=NOT_SENT),
        load("f", outcome="NACK", kind=Kind.HANDOVER),  # declines, and loads the files
        load("g", outcome=None),
    ]
    found = past_update(version(1, kind=Kind.DELTA), loads)
    assert found.done == {"delta": 1, "full": 1}
    assert found.failed == {"NACK": 1, "TAINTED": 1, NOT_SENT: 1}
    assert found.pause is not None
    assert found.pause.count == 2


def test_an_outage_lasts_from_the_first_entry_to_the_first_that_says_otherwise() -> None:
    log = [event(0, "IN_SYNC"), event(1, "UNREACHABLE", "no answer"), event(2, "UNREACHABLE"), event(3, "UPDATING")]
    assert outages(log) == [
        Outage(state=EngineState.UNREACHABLE, since="00:00:01", until="00:00:03", reason="no answer")
    ]


def test_while_it_is_repaired_the_contents_of_an_engine_are_still_unknown() -> None:
    log = [event(1, "TAINTED"), event(2, "UPDATING"), event(3, "VERIFYING"), event(4, "IN_SYNC")]
    assert [(found.since, found.until) for found in outages(log)] == [("00:00:01", "00:00:04")]


def test_one_outage_may_follow_another_and_the_last_may_go_on() -> None:
    found = outages([event(1, "TAINTED"), event(2, "UNREACHABLE"), event(3, "QUARANTINED")])
    assert [(each.state.value, each.since, each.until) for each in found] == [
        ("TAINTED", "00:00:01", "00:00:02"),
        ("UNREACHABLE", "00:00:02", "00:00:03"),
        ("QUARANTINED", "00:00:03", None),
    ]
    assert outages([event(1, "UNREACHABLE"), event(2, None, "removed")])[0].until == "00:00:02"


def test_an_engines_loads_say_their_step_and_for_how_long_it_stood_still() -> None:
    past = engine_past("a", [load(), load(outcome=None, timings={})], [], more=True)
    assert [(each.step, each.ms, each.pause) for each in past.loads] == [(1, 100.0, 95.0), (1, None, None)]
    assert past.more


def manifest(**fields: Any) -> Manifest:
    defaults: dict[str, Any] = {"files": {}, "tensors": TensorsSummary(count=0, bytes=0, dtypes={})}
    return Manifest(run="run", generation=1, step=1, created_at=SEEN, **(defaults | fields))


@pytest.mark.parametrize("density", [-0.1, 1.5, 1e308])
def test_a_density_that_is_no_share_is_not_believed(density: float) -> None:
    found = with_making(version(1), manifest(density=density, why_full="x" * 10_000))
    assert found.announced.density is None
    assert len(found.announced.why_full or "") == 300


def test_a_reason_is_shown_on_one_line_without_control_characters() -> None:
    assert with_making(version(1), manifest(why_full="a\n\x1b[2J")).announced.why_full == r"a\n\x1b[2J"


def test_a_delta_of_a_publisher_that_says_no_density_has_that_of_its_changes() -> None:
    facts = DeltaFacts(file="f", encoding="flat", compression="none", tensors=1, changed=5, elements=100)
    assert with_making(version(1), manifest(delta=facts)).announced.density == 0.05
