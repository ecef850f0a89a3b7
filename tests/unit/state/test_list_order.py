"""The order of lists over all runs: by time across runs, by generation and step within one."""

from hypothesis import given
from hypothesis import strategies as st

from refitd.state.version_index import ListOrder
from refitd_client.contract.naming import Order

Sight = tuple[str, Order]
SIGHTS = st.lists(
    st.tuples(st.sampled_from("abc"), st.builds(Order, st.integers(1, 3), st.integers(0, 9))), unique=True, max_size=40
)


def key(lists: ListOrder, seen: Sight) -> tuple[int, int, int]:
    run, order = seen
    return lists.of(run, order), order.generation, order.step


def listed(lists: ListOrder, seen: list[Sight]) -> list[str]:
    newest_first = sorted(seen, key=lambda each: key(lists, each), reverse=True)
    return [f"{run}{order.step}" for run, order in newest_first]


def sights(text: str) -> list[Sight]:
    return [(word[0], Order(1, int(word[1:]))) for word in text.split()]


def after(text: str) -> list[str]:
    lists, seen = ListOrder(), sights(text)
    for run, order in seen:
        lists.of(run, order)
    return listed(lists, seen)


def test_across_runs_what_was_seen_later_is_newer_whatever_its_step() -> None:
    assert after("a100 b1 a101 b2") == ["b2", "a101", "b1", "a100"]


def test_a_late_step_stands_right_behind_the_next_step_of_its_run() -> None:
    assert after("a1 b1 a3 b2 a2") == ["b2", "a3", "a2", "b1", "a1"]


@given(SIGHTS)
def test_within_a_run_the_order_is_that_of_generation_and_step(seen: list[Sight]) -> None:
    lists = ListOrder()
    for run, order in seen:
        lists.of(run, order)
    for run in "abc":
        mine = [each for each in seen if each[0] == run]
        by_order = sorted(mine, key=lambda each: each[1])
        assert sorted(mine, key=lambda each: key(lists, each)) == by_order


@given(SIGHTS)
def test_no_two_versions_have_one_key_and_no_key_changes_when_others_come(seen: list[Sight]) -> None:
    lists = ListOrder()
    given_first = [key(lists, each) for each in seen]
    assert [key(lists, each) for each in seen] == given_first
    assert len(set(given_first)) == len(seen)


@given(SIGHTS, st.integers(0, 40))
def test_places_that_were_read_back_go_on_as_if_the_service_had_never_stopped(seen: list[Sight], stop: int) -> None:
    whole, before, again = ListOrder(), ListOrder(), ListOrder()
    for run, order in seen[:stop]:
        row = (order.generation, order.step, before.of(run, order))
        again.remember(run, row)
    assert [key(again, each) for each in seen] == [key(whole, each) for each in seen]
