"""Which slots stay, and which versions' files may be written again at all."""

from dataclasses import replace

import pytest

from refitd.policy.leases import EngineView, Load, RunView, Views
from refitd.policy.spare_slots import SlotRules, newest_full, spare, why_not
from refitd.root.scan import Slot
from refitd.state.version import VersionRecord
from refitd_client.contract.states import EngineState, Kind, VersionState
from support.records import version

OWNED = version(1, owned=True, state=VersionState.RETIRED)
NEWEST = {"run": "L"}


def slot(number: int, **fields: object) -> Slot:
    return replace(Slot(run="run", name=f"L-{number}", bytes=100, layout="L"), **fields)  # type: ignore[arg-type]


def kept(
    *slots: Slot, rules: SlotRules | None = None, ages: dict[str, float] | None = None, used: int = 0
) -> list[str]:
    verdicts = spare(slots, NEWEST, rules or SlotRules(), used=used, ages=ages or {})
    assert all(verdict.reason for verdict in verdicts)
    assert len(verdicts) == len(slots)
    return sorted(verdict.slot.name for verdict in verdicts if verdict.keep)


def test_a_run_has_at_most_so_many_and_the_one_that_waits_longest_goes() -> None:
    ages = {slot(1).path: 30.0, slot(2).path: 20.0, slot(3).path: 10.0}
    assert kept(slot(1), slot(2), slot(3), ages=ages) == ["L-2", "L-3"]
    assert kept(slot(1), slot(2), replace(slot(3), run="other"), ages=ages) == ["L-1", "L-2"]


def test_a_slot_of_another_inventory_than_the_newest_version_s_goes() -> None:
    assert kept(slot(1), slot(2, layout="M")) == ["L-1"]


def test_a_run_without_a_version_of_refitd_s_keeps_no_slots() -> None:
    assert kept(slot(1, run="gone")) == []


def test_a_run_that_is_closed_keeps_no_slots() -> None:
    (verdict,) = spare([slot(1)], NEWEST, SlotRules(), used=0, ages={}, closed={"run"})
    assert (verdict.keep, verdict.reason) == (False, "run run is closed")


def test_slots_are_the_first_thing_that_a_disk_budget_gives_up() -> None:
    rules = SlotRules(disk_budget=1000)
    assert kept(slot(1), slot(2), rules=rules, used=800) == ["L-1", "L-2"]
    assert len(kept(slot(1), slot(2), rules=rules, used=801)) == 1
    assert kept(slot(1), slot(2), rules=rules, used=901) == []


def test_where_slots_are_off_those_that_are_there_go() -> None:
    assert kept(slot(1), rules=SlotRules(off="the root is on nfs4")) == []


def test_what_is_spoilt_goes_and_what_others_put_there_stays() -> None:
    assert kept(slot(1, fault="was being made")) == []
    assert kept(slot(1, fault="is somebody's", ours=False)) == ["L-1"]


def test_a_version_that_nobody_needs_may_be_written_again() -> None:
    assert why_not(OWNED, Views()) is None


@pytest.mark.parametrize(
    "record",
    [
        OWNED.having(owned=False),
        replace(OWNED, kind=Kind.DELTA),
        OWNED.having(weights=None),
        replace(OWNED, state=VersionState.LOST),
        replace(OWNED, state=VersionState.REJECTED),
    ],
    ids=["another's", "delta", "never read", "lost", "rejected"],
)
def test_what_refitd_did_not_write_as_a_good_full_version_is_not_written_again(record: VersionRecord) -> None:
    assert why_not(record, Views()) is not None


DEAD = 10 * 24 * 3600.0  # seconds; it pins nothing any more


@pytest.mark.parametrize(
    "view",
    [
        EngineView(id="e", run="run", state=EngineState.UNREACHABLE, serving=OWNED.id, unreachable_for=DEAD),
        EngineView(id="e", run="run", state=EngineState.UNREACHABLE, named=(OWNED.id,), unreachable_for=DEAD),
        EngineView(id="e", run="run", state=EngineState.UNREACHABLE, loads=(Load(version=OWNED.id),)),
        EngineView(id="e", run="run", state=EngineState.TAINTED, loads=(Load(version=OWNED.id, unproven=True),)),
        EngineView(id="e", run="run", state=EngineState.IN_SYNC, serving=OWNED.id),
    ],
    ids=["dead and serving", "dead and named", "out of reach in a load", "load without proof", "serving"],
)
def test_what_an_engine_may_still_have_open_is_not_written_again(view: EngineView) -> None:
    """A dead engine holds up no deletion: whoever has a deleted file open reads on. Not so one that is overwritten."""
    assert why_not(OWNED, Views(engines=(view,))) is not None


def test_a_run_s_target_is_not_written_again() -> None:
    assert why_not(OWNED, Views(runs=(RunView(run="run", target=OWNED.id),))) is not None


def test_the_newest_version_of_a_run_is_a_good_full_one_of_refitd_s() -> None:
    versions = [
        version(1, owned=True),
        version(2, owned=True),
        version(3, owned=True, state=VersionState.REJECTED),
        version(4, owned=True, kind=Kind.DELTA),
        version(5),
        version(1, generation=2, owned=True),
        version(7, run="other", owned=True),
    ]
    assert [newest.id for newest in newest_full(versions)] == ["run~v000001.g2", "other~v000007"]
