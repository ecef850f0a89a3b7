"""How chaos tells a right answer from a wrong one. Were it lenient, its zeros would mean nothing."""

from dataclasses import replace

import pytest

from chaos.answers import Answer, Claim, Right, Span, Spanning, Tokens, Wrong, judge
from chaos.book import AT_START, Book, Published
from chaos.plan import VLLM
from refitd_client.contract.naming import Order

MODELS = {"m0": (1, 2, 3, 4), "m1": (5, 6, 7, 8), "m2": (5, 6, 9, 9)}
SEVEN = Published(Order(1, 7), "m1")
EIGHT = Published(Order(1, 8), "m2")
SEVEN_AGAIN = Published(Order(2, 7), "m2")


def expected(model: str, _: int) -> Tokens:
    return MODELS[model]


def answer(
    tokens: Tokens, *spans: tuple[str, int, int], retractions: int = 0, floor: Order = AT_START.order, label: str = ""
) -> Answer:
    return Answer(
        engine="e",
        prompt=0,
        tokens=tokens,
        label=label or spans[-1][0],
        spans=tuple(Span(*span) for span in spans),
        retractions=retractions,
        floor=floor,
        sent=0.0,
        received=1.0,
    )


def book(*versions: Published) -> Book:
    return Book(set(versions))


def test_an_answer_of_the_version_that_it_claims_is_right() -> None:
    assert judge(answer((5, 6, 7, 8), ("7", 0, 4)), book(SEVEN, EIGHT), expected) == Right(SEVEN)


def test_an_answer_of_another_version_is_wrong() -> None:
    verdict = judge(answer((5, 6, 9, 9), ("7", 0, 4)), book(SEVEN, EIGHT), expected)
    assert isinstance(verdict, Wrong)
    assert "its first 4 tokens are those of v000008 (m2)" in verdict.reason


def test_a_label_that_nobody_published_is_wrong() -> None:
    assert isinstance(judge(answer((5, 6, 7, 8), ("9", 0, 4)), book(SEVEN, EIGHT), expected), Wrong)


def test_the_same_step_of_another_generation_has_a_label_of_its_own() -> None:
    both = book(SEVEN, SEVEN_AGAIN)
    assert judge(answer((5, 6, 7, 8), ("7", 0, 4)), both, expected) == Right(SEVEN)
    assert judge(answer((5, 6, 9, 9), ("7.g2", 0, 4)), both, expected) == Right(SEVEN_AGAIN)
    assert isinstance(judge(answer((5, 6, 9, 9), ("7", 0, 4)), both, expected), Wrong)


def test_an_engine_that_went_back_is_wrong() -> None:
    late = answer((5, 6, 7, 8), ("7", 0, 4), floor=EIGHT.order)
    assert isinstance(judge(late, book(SEVEN, EIGHT), expected), Wrong)


def test_start_up_weights_are_right_until_the_engine_was_seen_on_a_version() -> None:
    assert judge(answer((1, 2, 3, 4), ("default", 0, 4)), book(SEVEN), expected) == Right(AT_START)
    late = answer((1, 2, 3, 4), ("default", 0, 4), floor=SEVEN.order)
    assert isinstance(judge(late, book(SEVEN), expected), Wrong)


def test_an_answer_known_as_spanning_leaves_a_claim_about_what_follows() -> None:
    spanning = answer((5, 6, 0, 0), ("7", 0, 2), ("8", 2, 4), retractions=1)
    claim = Claim(models=("m2",), prompt=0, before=(5, 6), tokens=(0, 0))
    assert judge(spanning, book(SEVEN, EIGHT), expected) == Spanning((claim,))


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (answer((5, 6, 0, 0), ("7", 0, 2), ("8", 2, 4)), "never held"),
        (answer((1, 6, 0, 0), ("7", 0, 2), ("8", 2, 4), retractions=1), "no beginning"),
        (answer((5, 6, 0, 0), ("7", 0, 2), ("9", 2, 4), retractions=1), "cannot have served"),
        (answer((5, 6, 0, 0), ("7", 0, 1), ("8", 2, 4), retractions=1), "do not make up"),
        (answer((5, 6, 0, 0), ("7", 0, 2), ("8", 2, 3), retractions=1), "do not make up"),
        (answer((5, 6, 0, 0), ("7", 0, 2), ("8", 2, 4), retractions=1, label="7"), "do not make up"),
    ],
)
def test_a_spanning_answer_that_does_not_add_up_is_wrong(odd: Answer, why: str) -> None:
    verdict = judge(odd, book(SEVEN, EIGHT), expected)
    assert isinstance(verdict, Wrong)
    assert why in verdict.reason


def test_an_answer_of_a_vllm_names_no_version_and_is_one_versions_or_goes_on_as_another() -> None:
    """Where an update has cut it in two nothing says so, and what comes after is a claim. Others have to say it."""

    def unlabelled(tokens: Tokens, floor: Order = AT_START.order, engine: str = VLLM) -> Answer:
        return replace(answer(tokens, ("7", 0, 4), floor=floor), engine=engine, label="", spans=())

    both = book(SEVEN, EIGHT)
    assert judge(unlabelled((5, 6, 7, 8)), both, expected) == Right(SEVEN)
    cut = judge(unlabelled((1, 2, 7, 8)), both, expected)
    assert cut == Spanning((Claim(("m0", "m1", "m2"), 0, (1, 2), (7, 8)),))
    late = judge(unlabelled((5, 6, 0, 8), floor=EIGHT.order), both, expected)
    assert late == Spanning((Claim(("m2",), 0, (5, 6), (0, 8)),))
    assert isinstance(judge(unlabelled((9, 9, 9, 9)), both, expected), Wrong)
    assert isinstance(judge(unlabelled((1, 2, 3, 4), floor=SEVEN.order), both, expected), Wrong)
    assert isinstance(judge(unlabelled((5, 6, 7, 8), engine="sglang"), both, expected), Wrong)
