"""One request: which weights its tokens came from, when it ends, and what is answered about it."""

import pytest

from refitd_embedded.routes import answer
from refitd_embedded.runner import GenerationRequest, SamplingParams, VersionSpan, aborted, finished, spans
from support.embedded_kit import ask


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ([("1", 4)], [VersionSpan("1", 0, 4)]),
        ([("1", 2), ("2", 4)], [VersionSpan("1", 0, 2), VersionSpan("2", 2, 4)]),
        ([("1", 2), ("2", 2), ("3", 4)], [VersionSpan("1", 0, 2), VersionSpan("3", 2, 4)]),
        ([("1", 2), ("1", 4)], [VersionSpan("1", 0, 4)]),
        ([("1", 4), ("2", 4)], [VersionSpan("1", 0, 4)]),
        ([("1", 0)], [VersionSpan("1", 0, 0)]),
    ],
    ids=["one", "two", "none-in-between", "back-to-the-same", "no-token-of-the-last", "no-token-at-all"],
)
def test_spans_cover_the_tokens_once(changes: list[tuple[str, int]], wanted: list[VersionSpan]) -> None:
    assert spans(changes, changes[-1][1]) == wanted


def test_an_answer_names_the_weights_of_its_last_token_whatever_the_front_end_says() -> None:
    request = ask()
    assert answer(request, "front")["meta_info"]["weight_version"] == "front"
    request.output, request.output_logprobs = [1, 2, 3], [-1.0, -2.0, -3.0]
    request.relabel("7")
    request.output, request.output_logprobs = [1, 2, 3, 4], [-1.0, -2.0, -3.0, float("nan")]
    assert "weight_versions" not in answer(request, "front")["meta_info"], "only a finished answer has them"
    request.end({"type": "length", "length": 4}, "8")
    meta = answer(request, "front")["meta_info"]
    assert meta["weight_version"] == "8"
    assert meta["weight_versions"] == [{"version": "7", "start": 0, "end": 3}, {"version": "8", "start": 3, "end": 4}]
    assert meta["output_token_logprobs"][3] == [None, 4, None], "JSON has no NaN"


def test_of_a_request_that_never_ran_only_little_is_known() -> None:
    request = ask()
    request.ended_waiting = True
    request.end(aborted(ran=False), "7")
    meta = answer(request, "7")["meta_info"]
    assert meta["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    assert "prompt_tokens" not in meta
    assert meta["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("raw", "output", "wanted"),
    [
        ({}, [5], None),
        ({}, [5, 2], {"type": "stop", "matched": 2}),
        ({"ignore_eos": True}, [5, 2], None),
        ({"stop_token_ids": [5]}, [5], {"type": "stop", "matched": 5}),
        ({"stop_token_ids": [5], "ignore_eos": True}, [5], None),
        ({"max_new_tokens": 2}, [5, 6], {"type": "length", "length": 2}),
        ({"max_new_tokens": 2}, [5, 2], {"type": "stop", "matched": 2}),
        ({"max_new_tokens": 0}, [], {"type": "length", "length": 0}),
        ({}, [], None),
    ],
)
def test_stop_tokens_come_before_length(raw: dict[str, object], output: list[int], wanted: object) -> None:
    request = GenerationRequest(rid="r", prompt=[1], params=SamplingParams.parse(raw), output=output)
    assert finished(request, frozenset({2})) == wanted
