"""The demo's questions to a vLLM, and what it says where there is none."""

from pathlib import Path

import httpx
import pytest

from refitd_embedded.demo import DemoOptions, main
from refitd_embedded.demo.policy import ANSWER, CountingProblem
from refitd_embedded.demo.rollouts import NotNowError, Question
from refitd_embedded.demo.vllm import ask

QUESTION = Question(CountingProblem(1, 3), 7)


def vllm(*labels: str, tokens: int = ANSWER) -> httpx.AsyncClient:
    """A server that says these labels, one after the other."""
    said = iter(labels)

    def reply(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/weight_info":
            return httpx.Response(200, json={"weight_version": next(said)})
        choice = {"token_ids": [5] * tokens, "logprobs": {"token_logprobs": [-0.5] * tokens}}
        return httpx.Response(200, json={"choices": [choice]})

    return httpx.AsyncClient(transport=httpx.MockTransport(reply))


async def test_an_answer_is_of_the_version_that_was_served_before_and_after_it() -> None:
    async with vllm("7", "7") as http:
        (rollout,) = await ask(http, "http://vllm", [QUESTION], 5.0)
    assert rollout is not None
    assert (rollout.versions, rollout.answer) == (("7",) * ANSWER, (5,) * ANSWER)


async def test_an_answer_over_an_update_is_asked_for_again() -> None:
    async with vllm("7", "8") as http:
        with pytest.raises(NotNowError, match="changed"):
            await ask(http, "http://vllm", [QUESTION], 5.0)


async def test_an_answer_that_was_cut_short_is_none() -> None:
    async with vllm("7", "7", tokens=ANSWER - 1) as http:
        assert await ask(http, "http://vllm", [QUESTION], 5.0) == [None]


def test_where_there_is_no_vllm_the_demo_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(DemoOptions(engine="vllm")) == 2
    assert "'make vllm' installs it" in capsys.readouterr().err


def test_another_kind_of_engine_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(DemoOptions(engine="trt")) == 2
    assert "--engine is 'trt': it is embedded or vllm" in capsys.readouterr().err
