"""Which version generated which tokens of an answer, read off the answers of both kinds of engines."""

from typing import Any

import pytest

from refitd_client.errors import UnlabelledAnswerError
from refitd_client.rollout import TokenCounts, TokenSpan, spans

TOLD = [{"version": "6", "start": 0, "end": 3}, {"version": "7", "start": 3, "end": 5}]
SGLANG = {"text": "", "output_ids": [1, 2, 3, 4, 5], "meta_info": {"weight_version": "7", "weight_versions": TOLD}}
OPENAI = {"choices": [{"text": "five"}], "metadata": {"weight_version": "7", "weight_versions": TOLD}}
VLLM = {"request_id": "r", "choices": [{"index": 0, "token_ids": [1, 2, 3, 4, 5], "weight_versions": TOLD}]}
SIX = TokenSpan(label="6", step=6, generation=1, run="run", version="run~v000006", start=0, end=3)
SEVEN = TokenSpan(label="7", step=7, generation=1, run="run", version="run~v000007", start=3, end=5)


@pytest.mark.parametrize("answer", [SGLANG, OPENAI, VLLM, VLLM["choices"][0]])
def test_both_kinds_of_engines_say_which_version_generated_which_tokens(answer: dict[str, Any]) -> None:
    assert spans(answer, run="run") == [SIX, SEVEN]
    assert [span.tokens for span in spans(answer)] == [3, 2]


def test_a_version_has_an_id_where_its_run_is_named() -> None:
    assert [span.version for span in spans(SGLANG, "exp/trial")] == ["exp~trial~v000006", "exp~trial~v000007"]
    assert [(span.step, span.run, span.version) for span in spans(SGLANG)] == [(6, None, None), (7, None, None)]


@pytest.mark.parametrize("label", ["default", "v7", "7.0", "7.g1", "7.g", "7.g02", "07", "\u0667", "-1", "9" * 14, ""])
def test_tokens_of_weights_that_refitd_did_not_load_have_no_step(label: str) -> None:
    told = {"meta_info": {"weight_versions": [{"version": label, "start": 0, "end": 2}]}}
    unknown = TokenSpan(label=label, step=None, generation=None, run="run", version=None, start=0, end=2)
    assert spans(told, "run") == [unknown]


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"error": {"message": "no"}},
        {"meta_info": {"weight_version": "7", "finish_reason": None}},  # not at its end yet, or an older SGLang
        {"choices": [{"text": "vLLM's completions"}]},
        {"choices": [{"text": "a"}, {"text": "b"}], "metadata": {"weight_versions": TOLD}},  # those of the first alone
        {"meta_info": {"weight_versions": []}},
        {"meta_info": {"weight_versions": "7"}},
        {"meta_info": {"weight_versions": [{"version": "7"}]}},
        {"meta_info": {"weight_versions": ["7"]}},
        {"meta_info": {"weight_versions": [{"version": "7", "start": 1, "end": 2}]}},
        {"meta_info": {"weight_versions": [TOLD[1], TOLD[0]]}},
        {"meta_info": {"weight_versions": [{"version": "7", "start": 0, "end": -1}]}},
    ],
)
def test_an_answer_that_does_not_say_it_is_an_error_and_no_guess(answer: dict[str, Any]) -> None:
    with pytest.raises(UnlabelledAnswerError):
        spans(answer)


RESUMED = [{"version": "31", "start": 0, "end": 3}, {"version": "29.g2", "start": 3, "end": 5}]


def test_an_answer_that_runs_into_a_resumed_training_names_versions_that_exist_and_no_negative_staleness() -> None:
    found = spans({"meta_info": {"weight_versions": RESUMED}}, run="run")
    assert [span.version for span in found] == ["run~v000031", "run~v000029.g2"]
    counts = TokenCounts()
    counts.add(found, step=29, generation=2)
    assert counts.by_staleness == {None: 3, 0: 2}


def test_tokens_are_counted_by_version_and_by_how_stale_they_were() -> None:
    counts = TokenCounts()
    counts.add(spans(SGLANG), step=7)
    counts.add(spans(VLLM), step=8)
    counts.add(spans({"meta_info": {"weight_versions": [{"version": "default", "start": 0, "end": 4}]}}), step=8)
    assert counts.by_step == {6: 6, 7: 4, None: 4}
    assert counts.by_staleness == {1: 3 + 2, 0: 2, 2: 3, None: 4}
