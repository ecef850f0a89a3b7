"""Who needs a version: leases are derived from what is true now."""

import pytest

from refitd.policy.leases import DEAD_AFTER, EngineView, Lease, LeaseKind, Load, RunView, Views, leases, reasons_of
from refitd_client.contract.states import EngineState


def _engine(**fields: object) -> EngineView:
    defaults: dict[str, object] = {"id": "127.0.0.1:30000", "run": "exp", "state": EngineState.IN_SYNC}
    return EngineView(**(defaults | fields))  # type: ignore[arg-type]


def _sentences(*engines: EngineView, runs: tuple[RunView, ...] = (), validating: tuple[str, ...] = ()) -> dict:
    found = leases(Views(engines=engines, runs=runs, validating=validating))
    return {version: [str(lease) for lease in held] for version, held in found.items()}


def test_an_engine_leases_what_it_serves_loads_and_may_be_restored_to() -> None:
    engine = _engine(
        state=EngineState.UPDATING,
        serving="exp~v000006",
        loads=(Load(version="exp~v000007", since="2026-11-21T12:00:00Z"),),
    )
    assert _sentences(engine, runs=(RunView(run="exp", last_good="exp~v000005"),)) == {
        "exp~v000007": ["engine 127.0.0.1:30000 loads it (since 2026-11-21T12:00:00Z)"],
        "exp~v000006": ["engine 127.0.0.1:30000 serves it"],
        "exp~v000005": ["last good version of run exp"],
    }


def test_what_deltas_were_written_into_is_leased_as_long_as_they_are_served() -> None:
    """The plugin has it mapped: written again as a slot, it would put something else back."""
    engine = _engine(serving="exp~v000009", beneath="exp~v000004")
    assert _sentences(engine)["exp~v000004"] == [
        "engine 127.0.0.1:30000 serves deltas that were written into it, and would be put back from it"
    ]


def test_a_load_that_timed_out_keeps_its_lease_beside_the_load_that_repairs_it() -> None:
    engine = _engine(
        state=EngineState.UPDATING,
        loads=(Load(version="exp~v000007", unproven=True), Load(version="exp~v000006")),
    )
    assert _sentences(engine) == {
        "exp~v000007": [
            "engine 127.0.0.1:30000 may still be reading it: its load timed out and nothing proved that it ended"
        ],
        "exp~v000006": ["engine 127.0.0.1:30000 loads it"],
    }


@pytest.mark.parametrize(("gone_for", "serves"), [(0.0, True), (DEAD_AFTER - 1, True), (DEAD_AFTER, False)])
def test_a_dead_engine_pins_what_it_served_for_a_while_only(gone_for: float, serves: bool) -> None:
    engine = _engine(state=EngineState.UNREACHABLE, serving="a", unreachable_for=gone_for)
    assert set(leases(Views(engines=(engine,)))) == ({"a"} if serves else set())


def test_a_dead_engine_pins_what_it_may_still_be_reading_until_there_is_proof() -> None:
    engine = _engine(
        state=EngineState.UNREACHABLE, serving="a", loads=(Load(version="b"),), unreachable_for=1000 * DEAD_AFTER
    )
    (lease,) = leases(Views(engines=(engine,)))["b"]
    assert lease.kind is LeaseKind.UNPROVEN
    assert "a" not in leases(Views(engines=(engine,)))


def test_a_run_leases_its_target_and_its_last_good_version_and_the_catalog_what_it_validates() -> None:
    run = RunView(run="exp/trial", target="b", last_good="a")
    assert _sentences(runs=(run,), validating=("c",)) == {
        "b": ["target of run exp/trial"],
        "a": ["last good version of run exp/trial"],
        "c": ["the catalog is validating it"],
    }
    run = RunView(run="exp", target="a", last_good="a", rolling_back=True)
    assert _sentences(runs=(run,)) == {"a": ["run exp is being rolled back to it", "last good version of run exp"]}


def test_each_kind_of_lease_has_a_sentence_of_its_own() -> None:
    assert len({str(Lease(kind=kind, holder="x")) for kind in LeaseKind}) == len(LeaseKind)


def test_many_engines_that_need_a_version_alike_are_one_reason_with_a_few_names() -> None:
    up = [_engine(id=f"e{number:02}", serving="a") for number in range(24)]
    away = [_engine(id=f"u{number}", serving="a", state=EngineState.UNREACHABLE) for number in range(4)]
    load = _engine(id="l", loads=(Load(version="a"),))
    held = leases(Views(engines=(*up, *away, load), runs=(RunView(run="exp", target="a"),)))["a"]
    assert reasons_of(held) == [
        "24 engines serve it: e00, e01, e02 and 21 more",
        "4 engines, which do not answer, may still serve it: u0, u1, u2 and 1 more",
        "engine l loads it",
        "target of run exp",
    ]
    assert reasons_of(held[:3]) == [f"engine e0{number} serves it" for number in range(3)]
