"""Rollouts over HTTP: what is asked, what is read, and what is asked again."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from refitd_embedded.demo import rollouts
from refitd_embedded.demo.policy import ANSWER, CountingProblem
from refitd_embedded.demo.rollouts import Engines, Question, RolloutError, read, request

Serve = Callable[[httpx.Request], httpx.Response]


def said(tokens: int = ANSWER, **meta: Any) -> dict[str, Any]:
    """What an engine answers to one prompt: the tokens 0, 1, 2, …, each at -1."""
    pairs = [[-1.0, token, None] for token in range(tokens)]
    return {"meta_info": {"output_token_logprobs": pairs, "weight_version": "7", **meta}}


def asking(serve: Serve, *, deadline: float = 5.0, check: Callable[[], None] = lambda: None) -> Engines:
    engines = Engines(["http://a/", "http://b"], check, deadline)
    engines._http = httpx.AsyncClient(transport=httpx.MockTransport(serve))
    return engines


def count(http: httpx.Request) -> int:
    return http.content.count(b"sampling_seed")


QUESTIONS = [Question(CountingProblem(1, start), seed=start) for start in range(6)]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "PAUSE", 0.0)


def test_each_prompt_is_sampled_from_the_plain_distribution_with_a_seed_of_its_own() -> None:
    body = request(QUESTIONS[:2])
    assert body["input_ids"] == [[16, 0], [16, 1]]
    assert [one["sampling_seed"] for one in body["sampling_params"]] == [0, 1]
    assert all(one["temperature"] == 1 and one["top_p"] == 1 for one in body["sampling_params"])
    assert body["return_logprob"] is True


def test_every_token_names_its_version() -> None:
    spans = [{"version": "7", "start": 0, "end": 3}, {"version": "8", "start": 3, "end": ANSWER}]
    across, plain = (
        read(CountingProblem(1, 0), "http://a", said(weight_versions=spans)),
        read(CountingProblem(1, 0), "", said()),
    )
    assert across is not None
    assert across.versions == ("7", "7", "7", *["8"] * (ANSWER - 3))
    assert plain is not None
    assert plain.versions == ("7",) * ANSWER
    assert plain.tokens == [16, 0, *range(ANSWER)]


def test_both_engines_are_asked_and_answers_come_in_the_questions_order() -> None:
    with asking(lambda http: httpx.Response(200, json=[said(weight_version=http.url.host)] * count(http))) as engines:
        found = engines.answer(QUESTIONS)
    assert [one.problem for one in found] == [question.problem for question in QUESTIONS]
    assert [one.engine for one in found] == ["http://a"] * 3 + ["http://b"] * 3
    assert [one.versions[0] for one in found] == ["a"] * 3 + ["b"] * 3


def test_an_answer_that_a_pause_cut_short_is_asked_for_again_and_only_that() -> None:
    asked: list[int] = []

    def serve(http: httpx.Request) -> httpx.Response:
        asked.append(count(http))
        first = said(3) if len(asked) == 1 else said()
        return httpx.Response(200, json=[first, *[said()] * (count(http) - 1)])

    with asking(serve) as engines:
        assert len(engines.answer(QUESTIONS)) == 6
    assert sorted(asked) == [1, 3, 3]


def test_an_engine_that_is_starting_is_asked_again() -> None:
    refusals = iter([httpx.ConnectError("refused"), httpx.Response(503, text="updating"), None, None])

    def serve(http: httpx.Request) -> httpx.Response:
        match next(refusals):
            case httpx.ConnectError() as error:
                raise error
            case httpx.Response() as refusal:
                return refusal
            case None:
                return httpx.Response(200, json=[said()] * count(http))

    with asking(serve) as engines:
        assert len(engines.answer(QUESTIONS)) == 6


def test_an_engine_that_never_answers_is_named_with_what_it_said_last() -> None:
    with (
        asking(lambda _: httpx.Response(503, text="still updating"), deadline=0.1) as engines,
        pytest.raises(RolloutError, match=r"http://[ab] owes 3 of 3 answers after 0.1 s: HTTP 503: still updating"),
    ):
        engines.answer(QUESTIONS)


def test_a_request_that_an_engine_refuses_is_not_repeated() -> None:
    asked: list[str] = []

    def serve(http: httpx.Request) -> httpx.Response:
        asked.append(http.url.host)
        return httpx.Response(400, text="no such field")

    with asking(serve) as engines, pytest.raises(RolloutError, match="no such field"):
        engines.answer(QUESTIONS)
    assert len(asked) == len(set(asked))


def test_a_check_that_fails_ends_the_asking() -> None:
    def check() -> None:
        raise RuntimeError("engine-a died")

    with asking(lambda _: httpx.Response(503), check=check) as engines, pytest.raises(RuntimeError, match="died"):
        engines.answer(QUESTIONS)
