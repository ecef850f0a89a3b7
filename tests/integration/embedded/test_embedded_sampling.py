"""Drawing tokens: SGLang's knobs, log-probabilities and seeds."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from refitd_embedded.runner import SamplingParams, draw

VOCAB = 50


def drawn(
    *raw: dict[str, Any], of: torch.Tensor, at: Sequence[int] | None = None, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and log-probabilities of rows of logits, one row for each of `raw`; `at`: their positions."""
    params = [SamplingParams.parse(one) for one in raw]
    return draw(params, of, [0] * len(raw) if at is None else at, torch.Generator().manual_seed(seed))


def logits(rows: int = 1, seed: int = 3) -> torch.Tensor:
    """Some."""
    return torch.randn((rows, VOCAB), generator=torch.Generator().manual_seed(seed)) * 2


def test_temperature_zero_is_greedy_and_counts_as_one() -> None:
    ids, found = drawn({"temperature": 0}, {"temperature": 1}, of=logits(2))
    assert ids[0] == logits(2)[0].argmax()
    assert found[0] == pytest.approx(logits(2)[0].log_softmax(-1).max().item(), abs=1e-5)


def test_a_seeded_answer_depends_on_seed_and_position_alone() -> None:
    seeded = {"sampling_seed": 42, "temperature": 1.0}
    alone = drawn(seeded, of=logits(1), at=[9], seed=1)[0][0]
    rows = torch.cat((logits(1), logits(3, seed=8)))
    batch = drawn(seeded, {"temperature": 0.5}, {}, {}, of=rows, at=[9, 1, 2, 3], seed=2)[0][0]
    assert alone == batch
    many = [int(drawn(seeded, of=logits(1), at=[position])[0][0]) for position in range(40)]
    assert len(set(many)) > 5


@pytest.mark.parametrize("raw", [{"temperature": 0}, {}, {"sampling_seed": 1}])
def test_nan_gives_token_zero(raw: dict[str, Any]) -> None:
    ids, logprobs = drawn(raw, of=torch.full((1, VOCAB), float("nan")))
    assert ids.tolist() == [0]
    assert logprobs.isnan().all()


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({"temperature": -1}, "temperature must be a non-negative finite number"),
        ({"temperature": float("inf")}, "temperature must be"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0.5}, "top_p is not supported"),
        ({"top_k": 3}, "top_k is not supported"),
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0"),
        ({"min_new_tokens": 3}, "min_new_tokens is not supported"),
        ({"sampling_seed": 2**63}, "sampling_seed"),
        ({"stop_token_ids": [1, "x"]}, "stop_token_ids"),
        ({"bogus": 1}, "unknown field `bogus`"),
        ({"stop": ["\n"]}, "stop is not supported"),
        ({"frequency_penalty": 0.5}, "frequency_penalty is not supported"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(raw: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SamplingParams.parse(raw)
