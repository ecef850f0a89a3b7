"""Rollouts over HTTP: what is asked, what is read, and what is asked again."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from refitd_embedded.demo import rollouts
from refitd_embedded.demo.policy import ANSWER, CountingProblem
from refitd_embedded.demo.rollouts import Engines, Question, RolloutError

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


def test_an_answer_that_a_pause_cut_short_is_asked_for_again_and_only_that() -> None:
    asked: list[int] = []

    def serve(http: httpx.Request) -> httpx.Response:
        asked.append(count(http))
        first = said(3) if len(asked) == 1 else said()
        return httpx.Response(200, json=[first, *[said()] * (count(http) - 1)])

    with asking(serve) as engines:
        assert len(engines.answer(QUESTIONS)) == 6
    assert sorted(asked) == [1, 3, 3]


def test_an_engine_that_never_answers_is_named_with_what_it_said_last() -> None:
    with (
        asking(lambda _: httpx.Response(503, text="still updating"), deadline=0.1) as engines,
        pytest.raises(RolloutError, match=r"http://[ab] owes 3 of 3 answers after 0.1 s: HTTP 503: still updating"),
    ):
        engines.answer(QUESTIONS)
