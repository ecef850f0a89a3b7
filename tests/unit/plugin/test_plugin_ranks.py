"""Ranks that decide together: all do the same, also when one is late, gone, or sees something else."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore

from refitd_plugin.update.ranks import Decision, NextStep, RankReport, Ranks, RankState, after_commit, after_prepare


def ranks(store: Any, size: int, wait: float = 30.0) -> list[Ranks]:
    return [Ranks(store, rank, size, wait) for rank in range(size)]


def prepare(each: Ranks, state: RankState) -> Decision:
    each.begin()
    return each.decide("prepare", RankReport(rank=each.rank, state=state, version="v"), after_prepare)[0]


def together(all_ranks: list[Ranks], states: list[RankState]) -> list[Decision]:
    with ThreadPoolExecutor(len(all_ranks)) as pool:
        return list(pool.map(prepare, all_ranks, states))


def test_rounds_do_not_mix_and_old_ones_are_forgotten() -> None:
    store = HashStore()
    two = ranks(store, 2)
    for number in range(8):
        states = [RankState.READY, RankState.REFUSED if number % 2 else RankState.READY]
        wanted = NextStep.REFUSE if number % 2 else NextStep.COMMIT
        assert {each.step for each in together(two, states)} == {wanted}
    assert store.num_keys() <= 3 * 3


def test_a_rank_that_comes_too_late_does_what_was_decided_without_it() -> None:
    first, late = ranks(HashStore(), 2, wait=0.05)
    assert prepare(first, RankState.READY).step is NextStep.ABANDON
    assert prepare(late, RankState.READY).step is NextStep.ABANDON


def test_a_rank_that_waited_too_long_goes_along_when_the_others_agreed() -> None:
    store = HashStore()
    first, second = ranks(store, 2, wait=0.05)
    second.begin()
    store.set(f"refitd/1/prepare/{second.rank}", '{"rank":1,"state":"ready","version":"v"}')
    assert prepare(first, RankState.READY).step is NextStep.COMMIT
    store.delete_key("refitd/1/prepare/0")  # as if its report had not come in time
    report = RankReport(rank=1, state=RankState.READY, version="v")
    assert second.decide("prepare", report, after_prepare)[0].step is NextStep.COMMIT


def test_nothing_is_believed_that_is_no_report() -> None:
    store = HashStore()
    first, second = ranks(store, 2, wait=0.05)
    first.begin()
    second.begin()
    store.set("refitd/1/commit/1", "written, honestly")
    mine = RankReport(rank=0, state=RankState.WRITTEN)
    assert first.decide("commit", mine, after_commit)[0].step is NextStep.RESTORE


def test_a_rank_alone_needs_no_store_and_two_do() -> None:
    assert prepare(Ranks(None, 0, 1, 1.0), RankState.READY).step is NextStep.COMMIT
    with pytest.raises(ValueError, match="store"):
        Ranks(None, 0, 2, 1.0)
