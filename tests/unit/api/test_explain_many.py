"""`refitd explain` of a version where engines are many: a sentence for those that are alike, with a few names."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from refitd.clock import SystemClock
from refitd.explain.version import explain_version
from refitd.state.journal.journal import Journal
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.update.targets import Targets
from refitd_client.contract.states import EngineState
from refitd_client.contract.wire import ReclaimPlan
from support.records import engine, version

ONE, TWO = version(1, served_at="2026-01-01T00:00:01Z"), version(2)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(Journal(tmp_path), SystemClock())
    for each in (ONE, TWO):
        made.put_version(each)
    yield made
    made.journal.close()


def explained(store: Store, record: VersionRecord = TWO, *, never_sent: bool = False) -> list[str]:
    plan = ReclaimPlan(items=[], freed_bytes=0)
    return list(explain_version(record, store, Targets(store), plan, never_sent=never_sent))


def put(store: Store, count: int, prefix: str, serving: str, state: EngineState, reason: str | None = None) -> None:
    for number in range(count):
        store.put_engine(engine(f"{prefix}{number:02}", serving=serving, state=state, reason=reason))


def test_many_engines_are_told_of_in_a_sentence_for_each_state(store: Store) -> None:
    put(store, 24, "s", TWO.id, EngineState.IN_SYNC)
    put(store, 5, "g", TWO.id, EngineState.UNREACHABLE)
    put(store, 6, "b", ONE.id, EngineState.BEHIND)
    put(store, 4, "u", ONE.id, EngineState.UNREACHABLE, "connection refused")
    assert explained(store)[1:] == [
        "24 engines serve it: s00, s01, s02 and 21 more.",
        "5 engines served it when they were last reached: g00, g01, g02 and 2 more.",
        "6 engines do not serve it yet; they are BEHIND and serve run~v000001: b00, b01, b02 and 3 more.",
        "4 engines do not serve it yet; they are UNREACHABLE (u00: connection refused): u00, u01, u02 and 1 more.",
    ]


def test_up_to_three_engines_have_a_sentence_each(store: Store) -> None:
    put(store, 3, "s", TWO.id, EngineState.IN_SYNC)
    put(store, 1, "b", ONE.id, EngineState.BEHIND)
    assert explained(store)[1:] == [
        *(f"Engine s0{number} serves it." for number in range(3)),
        "Engine b00 does not serve it yet: it is BEHIND, and serves run~v000001.",
    ]


def test_of_many_engines_that_have_proved_its_tensors_a_few_are_named(store: Store) -> None:
    proved = TWO.having(proved_by=tuple(f"p{number}" for number in range(30)))
    assert any("by the GPUs of p0, p1, p2 and 27 more, and not" in sentence for sentence in explained(store, proved))


def test_a_version_that_was_overtaken_says_so_unless_it_was_served_or_is(store: Store) -> None:
    three, other = version(3), version(1, generation=2)
    store.put_version(three)
    assert "No engine was ever brought to it: step 3 overtook it." in explained(store, never_sent=True)
    assert "Not all engines of its run were proved to serve it: step 3 overtook it." in explained(store)
    for said in (explained(store, ONE), explained(store, three), explained(store, TWO.having(barred=True))):
        assert not any("overtook" in sentence for sentence in said)
    store.put_version(other)
    assert f"No engine was ever brought to it: {other.id} overtook it." in explained(store, never_sent=True)
    put(store, 1, "s", TWO.id, EngineState.IN_SYNC)
    assert not any("overtook" in sentence for sentence in explained(store))
