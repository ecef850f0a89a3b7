"""Who may be reading a copy: who serves, loads or names it; for ever when it is written, as versions when it goes."""

import pytest

from refitd.policy.leases import DEAD_AFTER, EngineView, Load, RunView, Views
from refitd.policy.materialize import Readers, readers_of, spare
from refitd.state.copy import Copy, doubted
from refitd_client.contract.naming import Order
from refitd_client.contract.states import EngineState

COPY = Copy(run="run", name="a" * 32, path=".refitd/copies/run/a", order=Order(1, 7))
SEVEN = "run~v000007"


def readers(*engines: EngineView, named: dict[str, str] | None = None, copy: Copy = COPY) -> Readers:
    runs = (RunView(run="run", target=SEVEN, last_good=SEVEN),)
    return readers_of([copy], Views(engines=engines, runs=runs), {id_: (path,) for id_, path in (named or {}).items()})[
        copy.name
    ]


def engine(state: EngineState = EngineState.IN_SYNC, **fields: object) -> EngineView:
    return EngineView(id="e", run="run", state=state, **fields)  # type: ignore[arg-type]


def test_a_version_that_only_rules_keep_is_read_by_nobody() -> None:
    """The target that no engine has begun to load may be overtaken, and the last good one can be made again."""
    assert readers(engine(serving="run~v000006")) == Readers()


@pytest.mark.parametrize(
    "reading",
    [
        engine(serving=SEVEN),
        engine(EngineState.UPDATING, loads=(Load(version=SEVEN),)),
        engine(EngineState.TAINTED, loads=(Load(version=SEVEN, unproven=True),)),
    ],
    ids=["serves", "loads", "may-still-load"],
)
def test_a_copy_that_an_engine_reads_or_may_be_reading_is_not_written(reading: EngineView) -> None:
    found = readers(reading)
    assert found.reads
    assert found.is_waited_for
    assert found.holders == {"e"}
    assert not found.may_go


def test_an_engine_that_names_the_folder_may_read_it_again() -> None:
    """Wherever it sees the root."""
    found = readers(engine(), named={"e": "/mnt/elsewhere/.refitd/copies/run/a"})
    assert found.reads == ("engine e names its folder as what it serves, and may read it again",)
    assert readers(engine(), named={"e": "/mnt/.refitd/copies/run/b"}) == Readers()


def test_an_engine_out_of_reach_keeps_a_copy_from_being_written_for_ever_and_holds_up_nobody() -> None:
    away = engine(EngineState.UNREACHABLE, serving=SEVEN, unreachable_for=10 * DEAD_AFTER)
    found = readers(away, named={"e": f"/root/{COPY.path}"})
    assert found.reads
    assert not found.is_waited_for
    assert found.may_go
    assert not readers(engine(EngineState.UNREACHABLE, serving=SEVEN, unreachable_for=1.0)).may_go


def test_an_engine_that_was_let_go_of_in_mid_load_is_waited_for() -> None:
    view = Views(engines=(EngineView(id="gone", run=None, state=EngineState.UPDATING, loads=(Load(version=SEVEN),)),))
    assert readers_of([COPY], view, {})[COPY.name].is_waited_for


def test_copies_of_a_run_that_makes_no_deltas_any_more_go_unless_they_are_read() -> None:
    other = Copy(run="run", name="b" * 32, path=".refitd/copies/run/b", order=Order(1, 6))
    read = {COPY.name: readers(engine(serving=SEVEN)), other.name: Readers()}
    kept = {verdict.copy.name: verdict.keep for verdict in spare([COPY, other], read, runs=[], busy=[], most=2)}
    assert kept == {COPY.name: True, other.name: False}
    assert all(verdict.keep for verdict in spare([COPY, other], read, runs=["run"], busy=[], most=2))


def test_what_is_one_too_many_goes_and_what_is_being_written_does_not() -> None:
    copies = [Copy(run="run", name=letter * 32, path=letter, order=Order(1, 5 + i)) for i, letter in enumerate("abc")]
    nobody = {copy.name: Readers() for copy in copies}
    dropped = [each.copy.path for each in spare(copies, nobody, runs=["run"], busy=[], most=2) if not each.keep]
    assert dropped == ["a"]
    assert all(verdict.keep for verdict in spare(copies, nobody, runs=["run"], busy=["run"], most=2))


def test_a_copy_that_is_worth_nothing_any_more_is_still_read_as_what_it_was() -> None:
    """Somebody changed it under an engine that loads it: it is not written before that load has ended."""
    loading = engine(EngineState.UPDATING, loads=(Load(version=SEVEN),))
    assert readers(loading, copy=doubted(COPY)).reads
    assert doubted(doubted(COPY)).read_as == SEVEN
