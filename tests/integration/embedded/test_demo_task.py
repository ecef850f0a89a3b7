"""The demo's task: what is asked, and how answers are marked."""

import random

import pytest

from refitd_embedded.demo.policy import ANSWER, NUMBERS, PROMPT, STRIDES, VOCABULARY, CountingProblem, problems


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("start", [0, 7, NUMBERS - 1])
def test_the_solution_gets_every_mark(stride: int, start: int) -> None:
    problem = CountingProblem(stride, start)
    assert problem.marks(problem.solution()) == [1.0] * ANSWER


def test_counting_goes_round_at_the_last_number() -> None:
    assert CountingProblem(stride=3, start=7).solution() == [10, 13, 0, 3, 6, 9, 12, 15]


def test_a_slip_costs_one_mark_and_counting_goes_on_from_it() -> None:
    assert CountingProblem(stride=1, start=0).marks([1, 2, 9, 10, 11, 12, 13, 14]) == [1, 1, 0, 1, 1, 1, 1, 1]


def test_nothing_follows_a_token_that_is_no_number() -> None:
    assert CountingProblem(stride=1, start=0).marks([NUMBERS, 1, 2]) == [0, 0, 1]


def test_the_same_answer_is_wrong_for_another_stride() -> None:
    assert CountingProblem(stride=2, start=0).marks(CountingProblem(stride=1, start=0).solution()) == [0.0] * ANSWER


def test_problems_that_differ_have_prompts_that_differ_within_the_vocabulary() -> None:
    every = [CountingProblem(stride, start) for stride in STRIDES for start in range(NUMBERS)]
    prompts = {tuple(problem.prompt) for problem in every}
    assert len(prompts) == len(every)
    assert all(len(prompt) == PROMPT and max(prompt) < VOCABULARY for prompt in prompts)


def test_the_same_seed_draws_the_same_problems() -> None:
    assert problems(random.Random(3), 20) == problems(random.Random(3), 20)
    assert problems(random.Random(3), 20) != problems(random.Random(4), 20)
