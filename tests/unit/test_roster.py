"""Which engines there are: what the journal knows against what the operator names."""

import pytest

from refitd.engine.engines_file import EngineSpec
from refitd.rollout.record import EngineRecord, Source
from refitd.rollout.roster import Named, Reconciled, reconcile
from refitd_client.contract.states import EngineState
from support.records import engine

FILE = frozenset({Source.FILE})


def named(url: str = "http://a", source: Source = Source.FILE, **more: str) -> Named:
    return Named(EngineSpec(url=url, **more), source)


def known(**more: object) -> EngineRecord:
    """Engine "a", of whose contents something is known that no operator can say."""
    held = {
        "source": Source.FILE,
        "state": EngineState.TAINTED,
        "serving": "run~v000001",
        "known": False,
        "unproven": ("run~v000002",),
        "strikes": {"run~v000002": 1},
    }
    return engine("a", **(held | more))


def hold(record: EngineRecord | None, entry: Named | None, sources: frozenset[Source] = FILE) -> Reconciled:
    """Reconcile what is known of engine "a" with what is said of it."""
    records = {} if record is None else {"a": record}
    return reconcile(records, {} if entry is None else {"a": entry}, sources)


@pytest.mark.parametrize(("run", "is_named"), [(None, False), ("run", True)])
def test_an_engine_that_is_new_is_taken_in_with_the_run_that_it_was_given(run: str | None, is_named: bool) -> None:
    entry = named() if run is None else named(run=run)
    new = EngineRecord(id="a", url="http://a", run=run, run_named=is_named, source=Source.FILE)
    assert hold(None, entry) == Reconciled(drop=(), keep=(new,))


def test_what_is_known_of_an_engine_outlives_a_restart_and_an_edit_of_the_file() -> None:
    assert hold(known(), named()) == Reconciled(drop=(), keep=(known(),))
    assert hold(known(), named(root="/mnt")) == Reconciled(drop=(), keep=(known(),))


def test_an_engine_that_is_named_no_more_is_dropped_by_who_named_it_and_by_nobody_else() -> None:
    assert hold(known(), None) == Reconciled(drop=("a",), keep=())
    assert hold(known(), None, frozenset({Source.SETTINGS})) == Reconciled(drop=(), keep=())
    assert hold(known(source=Source.API), None) == Reconciled(drop=(), keep=())


def test_another_address_is_another_engine() -> None:
    roster = hold(known(), named("http://b"))
    assert roster == Reconciled(drop=("a",), keep=(EngineRecord(id="a", url="http://b", source=Source.FILE),))


def test_an_engine_that_somebody_else_names_now_stays_what_it_is() -> None:
    roster = hold(known(source=Source.API), named())
    assert roster == Reconciled(drop=(), keep=(known(source=Source.FILE),))


def test_an_engine_that_is_given_another_run_holds_what_it_holds_and_serves_nothing_of_that_run() -> None:
    (record,) = hold(known(), named(run="other")).keep
    assert record == known(run="other", run_named=True, serving=None, strikes={})
    assert (record.known, record.unproven) == (False, ("run~v000002",))


def test_an_engine_that_is_given_the_run_that_it_followed_by_itself_goes_on() -> None:
    assert hold(known(), named(run="run")).keep == (known(run_named=True),)


def test_an_engine_whose_run_is_said_no_more_follows_none_until_it_is_bound_again() -> None:
    (record,) = hold(known(run_named=True), named()).keep
    assert record == known(run=None, run_named=False, serving=None, strikes={})
