"""What ranks decide together: the tables of `transaction`, and that an engine is only as good as its worst rank."""

from itertools import product

import pytest

from refitd_client.contract.plugin import UpdateOutcome
from refitd_plugin.update.ranks import (
    NextStep,
    RankReport,
    RankState,
    after_commit,
    after_prepare,
    after_restore,
)


def reports(*states: RankState | None, version: str = "v") -> list[RankReport | None]:
    return [
        None if state is None else RankReport(rank=rank, state=state, reason=f"{state} it is", version=version)
        for rank, state in enumerate(states)
    ]


@pytest.mark.parametrize(
    ("states", "step"),
    [
        ([RankState.READY], NextStep.COMMIT),
        ([RankState.READY, RankState.READY], NextStep.COMMIT),
        ([RankState.REFUSED, RankState.READY], NextStep.REFUSE),
        ([RankState.READY, RankState.REFUSED], NextStep.REFUSE),
        ([RankState.READY, None], NextStep.ABANDON),
        ([RankState.REFUSED, None], NextStep.ABANDON),
    ],
)
def test_nobody_writes_before_everybody_is_ready(states: list[RankState | None], step: NextStep) -> None:
    assert after_prepare(reports(*states)).step is step


def test_ranks_that_see_different_versions_load_none() -> None:
    some, others = reports(RankState.READY, version="a"), reports(RankState.READY, RankState.READY, version="b")
    decision = after_prepare([some[0], others[1]])
    assert (decision.step, "same version" in decision.reason) == (NextStep.REFUSE, True)


@pytest.mark.parametrize(
    "states", list(product([RankState.WRITTEN, RankState.UNTOUCHED, RankState.FAILED, None], repeat=3))
)
def test_a_version_is_kept_only_where_every_rank_has_all_of_it(states: tuple[RankState | None, ...]) -> None:
    step = after_commit(reports(*states)).step
    if set(states) == {RankState.WRITTEN}:
        assert step is NextStep.KEEP
    elif set(states) == {RankState.UNTOUCHED}:
        assert step is NextStep.REFUSE
    else:
        assert step is NextStep.RESTORE


@pytest.mark.parametrize(
    "states", list(product([RankState.UNTOUCHED, RankState.RESTORED, RankState.LOST, None], repeat=3))
)
def test_an_engine_is_as_well_known_as_its_worst_rank(states: tuple[RankState | None, ...]) -> None:
    outcome = after_restore(reports(*states))
    if {RankState.LOST, None} & set(states):
        assert outcome is UpdateOutcome.UNKNOWN
    else:
        assert outcome is (UpdateOutcome.RESTORED if RankState.RESTORED in states else UpdateOutcome.REFUSED)


def test_a_reason_says_whose_it_is_where_ranks_differ() -> None:
    assert after_prepare(reports(RankState.READY, RankState.REFUSED)).reason == "rank 1: refused it is"
    assert after_prepare(reports(RankState.REFUSED, RankState.REFUSED)).reason == "refused it is"
    assert "rank 1" in after_prepare(reports(RankState.READY, None)).reason
