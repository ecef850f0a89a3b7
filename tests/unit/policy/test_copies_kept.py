"""Which copies stay: those whose version an engine serves, loads, goes to or would go back to, and nothing more."""

import pytest

from refitd.policy.leases import DEAD_AFTER, EngineView, Load, RunView, Views
from refitd.policy.materialize import Copy, CopyVerdict, spare
from refitd_client.contract.naming import Order
from refitd_client.contract.states import EngineState

COPY = Copy(run="run", name="a", path=".refitd/copies/run/a", order=Order(1, 7), digest="xxh3:", signature="s")
SEVEN = "run~v000007"
EIGHT = RunView(run="run", target="run~v000008", last_good="run~v000008")


def judged(
    *engines: EngineView, run: RunView = EIGHT, named: str = "", copy: Copy = COPY, busy: str = ""
) -> CopyVerdict:
    (found,) = spare([copy], Views(engines=engines, runs=(run,)), {"e": (named,)}, busy=[busy])
    return found


def engine(state: EngineState = EngineState.IN_SYNC, **fields: object) -> EngineView:
    return EngineView(id="e", run="run", state=state, **fields)  # type: ignore[arg-type]


def test_a_copy_that_no_engine_needs_goes() -> None:
    found = judged(engine(serving="run~v000008"))
    assert (found.keep, found.reason) == (False, f"no engine needs {SEVEN} from it")


READING = [
    engine(serving=SEVEN),
    engine(EngineState.UPDATING, loads=(Load(version=SEVEN),)),
    engine(EngineState.TAINTED, loads=(Load(version=SEVEN, unproven=True),)),
    EngineView(id="gone", run=None, state=EngineState.UPDATING, loads=(Load(version=SEVEN),)),
]


@pytest.mark.parametrize("reading", READING, ids=["serves", "loads", "may-still-load", "removed-in-mid-load"])
def test_a_copy_that_an_engine_reads_or_may_be_reading_stays_also_where_nobody_believes_it_any_more(
    reading: EngineView,
) -> None:
    assert judged(reading).keep
    assert judged(reading, copy=COPY.doubted()).keep


@pytest.mark.parametrize(
    "run",
    [
        RunView(run="run", target=SEVEN, last_good=None),
        RunView(run="run", target="run~v000008", last_good=SEVEN),
        RunView(run="run", target="run~v000008", loadable=SEVEN, last_good=None),
        RunView(run="run", target=SEVEN, last_good=None, rolling_back=True),
    ],
    ids=["target", "last-good", "next", "rollback"],
)
def test_a_copy_that_engines_go_to_or_would_go_back_to_stays_unless_nobody_believes_it(run: RunView) -> None:
    assert judged(engine(), run=run).keep
    assert not judged(engine(), run=run, copy=COPY.doubted()).keep


def test_an_engine_that_names_the_folder_may_read_it_again() -> None:
    """Wherever it sees the root, and whatever an earlier refitd has made there."""
    old = Copy(run="run", name="a", path=COPY.path)
    for copy in (COPY, old):
        found = judged(engine(), named="/mnt/elsewhere/.refitd/copies/run/a", copy=copy)
        assert (found.keep, found.reason) == (
            True,
            "engine e names its folder as what it serves, and may read it again",
        )
        assert not judged(engine(), named="/mnt/.refitd/copies/run/b", copy=copy).keep


def test_an_engine_that_is_out_of_reach_keeps_a_copy_for_as_long_as_a_version() -> None:
    away = engine(EngineState.UNREACHABLE, serving=SEVEN, unreachable_for=DEAD_AFTER)
    assert not judged(away, named=f"/root/{COPY.path}").keep
    assert judged(engine(EngineState.UNREACHABLE, serving=SEVEN, unreachable_for=1.0)).keep


def test_a_copy_stays_while_another_is_made_which_may_be_from_it() -> None:
    assert judged(engine(), busy="run").keep
    assert not judged(engine(), busy="other").keep


def test_what_this_service_did_not_put_there_stays() -> None:
    stray = Copy(run="run", name="x", path=".refitd/copies/run/x", fault="was not put there by this service")
    assert judged(copy=stray).keep
