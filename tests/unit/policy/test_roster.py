"""Which engines there are: what the journal knows against what the operator names."""

from dataclasses import replace
from ipaddress import ip_address

import pytest

from refitd.engine.registry import EngineSpec
from refitd.policy.roster import NamedEngine, OperatorHosts, Reconciled, guard_of, moved, reconcile
from refitd.state.records import EngineRecord, Naming, Source
from refitd_client.contract.states import EngineState
from support.records import engine

FILE = frozenset({Source.FILE})


def named(url: str = "http://a", source: Source = Source.FILE, **more: str) -> NamedEngine:
    return NamedEngine(EngineSpec(url=url, **more), source)


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


def hold(record: EngineRecord | None, entry: NamedEngine | None, sources: frozenset[Source] = FILE) -> Reconciled:
    """Reconcile what is known of engine "a" with what is said of it."""
    records = {} if record is None else {"a": record}
    return reconcile(records, {} if entry is None else {"a": entry}, sources)


@pytest.mark.parametrize(("run", "is_named"), [(None, False), ("run", True)])
def test_an_engine_that_is_new_is_taken_in_with_the_run_that_it_was_given(run: str | None, is_named: bool) -> None:
    entry = named() if run is None else named(run=run)
    new = EngineRecord(id="a", url="http://a", run=run, naming=Naming(run_named=is_named, said=run, source=Source.FILE))
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
    assert roster == Reconciled(
        drop=("a",), keep=(EngineRecord(id="a", url="http://b", naming=Naming(source=Source.FILE)),)
    )


def test_another_server_beside_it_is_another_engine_and_the_same_ones_are_not() -> None:
    entry = NamedEngine(EngineSpec(url="http://a", pair=("http://b",)), Source.FILE)
    new = EngineRecord(id="a", url="http://a", naming=Naming(pair=("http://b",), source=Source.FILE))
    assert hold(known(), entry) == Reconciled(drop=("a",), keep=(new,))
    assert hold(known(pair=("http://b",)), entry) == Reconciled(drop=(), keep=(known(pair=("http://b",)),))


def test_the_hosts_of_all_servers_of_an_engine_of_the_file_may_be_called() -> None:
    guard = guard_of(OperatorHosts(), {"a": known(url="http://p", pair=("http://d",))})
    address = ip_address("10.0.0.1")
    assert [guard(host, address) is None for host in ("p", "d", "other")] == [True, True, False]


def test_an_engine_that_somebody_else_names_now_stays_what_it_is() -> None:
    roster = hold(known(source=Source.API), named())
    assert roster == Reconciled(drop=(), keep=(known(source=Source.FILE),))


def test_an_engine_that_is_given_another_run_goes_on_serving_what_it_serves() -> None:
    (record,) = hold(known(), named(run="other")).keep
    assert record == known(run="other", run_named=True, said="other", strikes={})
    assert (record.known, record.debts.unproven) == (False, ("run~v000002",))


def test_an_engine_that_is_given_the_run_that_it_followed_by_itself_goes_on() -> None:
    assert hold(known(), named(run="run")).keep == (known(run_named=True, said="run"),)


def test_an_engine_whose_run_is_said_no_more_follows_none_until_it_is_bound_again() -> None:
    (record,) = hold(known(run_named=True), named()).keep
    assert record == known(run=None, run_named=False, strikes={})


def after(record: EngineRecord, *words: str | None) -> EngineRecord:
    """The engine after its source has named these runs, one after the other."""
    for run in words:
        (record,) = hold(record, named() if run is None else named(run=run)).keep
    return record


FILE_SAYS_A = engine("a", source=Source.FILE, run="A", run_named=True, said="A")


@pytest.mark.parametrize("said", [("A",), ("A", "A"), (None,), (None, None)])
def test_a_move_holds_while_the_file_says_what_it_said_or_nothing_any_more(said: tuple[str | None, ...]) -> None:
    record = after(moved(FILE_SAYS_A, "B"), *said)
    assert (record.run, record.naming.moved) == ("B", True)


@pytest.mark.parametrize("said", [("C",), ("A", "C"), (None, "A", None), (None, "A"), ("C", "A")])
def test_a_move_ends_when_the_file_is_changed_to_name_a_run(said: tuple[str | None, ...]) -> None:
    record = after(moved(FILE_SAYS_A, "B"), *said)
    assert (record.run, record.naming.moved) == (said[-1], False)


def test_an_engine_that_is_moved_to_where_its_file_has_it_is_not_moved_any_more() -> None:
    record = after(moved(moved(FILE_SAYS_A, "B"), "A"), "C", "A")
    assert (record.run, record.naming.moved) == ("A", False)
    assert not after(moved(FILE_SAYS_A, "B"), "B").naming.moved


def test_why_an_engine_cannot_be_reached_is_still_known_when_it_is_moved() -> None:
    away = engine("a", run="A", state=EngineState.UNREACHABLE, reason="connection refused", failures=2)
    there = moved(away, "B")
    assert (there.state, there.reason, there.trouble.failures) == (EngineState.UNREACHABLE, "connection refused", 0)
    assert moved(replace(away, state=EngineState.NACKED), "B").state is EngineState.BEHIND


def test_a_move_outlives_a_source_that_names_no_runs() -> None:
    found = engine("a", source=Source.DISCOVERED, run="A")
    (record,) = hold(moved(found, "B"), NamedEngine(EngineSpec(url="http://a"), Source.DISCOVERED)).keep
    assert (record.run, record.naming.moved, record.naming.run_named) == ("B", True, True)
