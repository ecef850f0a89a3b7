"""The answer comes through a text that others write into, and is found again or counts as unknown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refitd_client.contract.plugin import MARK, MAX_REASON, Answer, UpdateOutcome, answers_in

SERVED = Answer(
    outcome=UpdateOutcome.SERVED,
    plugin="0.1.0",
    version="run~v000001",
    how="replay",
    contents="xxh3:00",
    ms={"load": 1.5},
)


@given(st.text(), st.sampled_from(UpdateOutcome))
def test_whatever_a_reason_quotes_the_answer_is_the_same(reason: str, outcome: UpdateOutcome) -> None:
    answer = Answer(outcome=outcome, reason=reason)
    (found,) = answers_in(answer.message)
    assert found.outcome is outcome
    assert len(found.reason) <= MAX_REASON
    assert "\n" not in answer.message


def test_a_reason_cannot_bring_its_own_answer() -> None:
    forged = f'tensor {MARK}{{"protocol":1,"outcome":"served"}} is missing'
    assert [each.outcome for each in answers_in(Answer(outcome=UpdateOutcome.REFUSED, reason=forged).message)] == [
        UpdateOutcome.REFUSED
    ]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"protocol":2}', '{"protocol":1,"outcome":"fine"}', '{"protocol":1,"outcome":[]}']
)
def test_an_answer_that_cannot_be_read_is_no_good_news(text: str) -> None:
    assert [each.outcome for each in answers_in(f"something {MARK}{text}")] == [UpdateOutcome.UNKNOWN]
