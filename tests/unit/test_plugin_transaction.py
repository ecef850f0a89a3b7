"""What ranks decide together: the tables of `transaction`, and that an engine is only as good as its worst rank."""

from itertools import product

import pytest

from refitd_sglang.transaction import (
    Outcome,
    Report,
    State,
    Step,
    after_commit,
    after_prepare,
    after_restore,
)


def reports(*states: State | None, version: str = "v") -> list[Report | None]:
    return [
        None if state is None else Report(rank=rank, state=state, reason=f"{state} it is", version=version)
        for rank, state in enumerate(states)
    ]


@pytest.mark.parametrize(
    ("states", "step"),
    [
        ([State.READY], Step.COMMIT),
        ([State.READY, State.READY], Step.COMMIT),
        ([State.REFUSED, State.READY], Step.REFUSE),
        ([State.READY, State.REFUSED], Step.REFUSE),
        ([State.READY, None], Step.ABANDON),
        ([State.REFUSED, None], Step.ABANDON),
    ],
)
def test_nobody_writes_before_everybody_is_ready(states: list[State | None], step: Step) -> None:
    assert after_prepare(reports(*states)).step is step


def test_ranks_that_see_different_versions_load_none() -> None:
    some, others = reports(State.READY, version="a"), reports(State.READY, State.READY, version="b")
    decision = after_prepare([some[0], others[1]])
    assert (decision.step, "same version" in decision.reason) == (Step.REFUSE, True)


@pytest.mark.parametrize("states", list(product([State.WRITTEN, State.UNTOUCHED, State.FAILED, None], repeat=3)))
def test_a_version_is_kept_only_where_every_rank_has_all_of_it(states: tuple[State | None, ...]) -> None:
    step = after_commit(reports(*states)).step
    if set(states) == {State.WRITTEN}:
        assert step is Step.KEEP
    elif set(states) == {State.UNTOUCHED}:
        assert step is Step.REFUSE
    else:
        assert step is Step.RESTORE


@pytest.mark.parametrize("states", list(product([State.UNTOUCHED, State.RESTORED, State.LOST, None], repeat=3)))
def test_an_engine_is_as_well_known_as_its_worst_rank(states: tuple[State | None, ...]) -> None:
    outcome = after_restore(reports(*states))
    if {State.LOST, None} & set(states):
        assert outcome is Outcome.UNKNOWN
    else:
        assert outcome is (Outcome.RESTORED if State.RESTORED in states else Outcome.REFUSED)


def test_a_reason_says_whose_it_is_where_ranks_differ() -> None:
    assert after_prepare(reports(State.READY, State.REFUSED)).reason == "rank 1: refused it is"
    assert after_prepare(reports(State.REFUSED, State.REFUSED)).reason == "refused it is"
    assert "rank 1" in after_prepare(reports(State.READY, None)).reason
