"""Drawing tokens: SGLang's knobs, log-probabilities and seeds."""

from typing import Any

import pytest
import torch

from refitd_embedded.runner import Sampler, SamplingParams
from refitd_embedded.wire import Bounds, GenerateBody, requests_of

VOCAB = 50


def sampler(*raw: dict[str, Any], seed: int = 0) -> Sampler:
    """For one row each."""
    return Sampler([SamplingParams.parse(one) for one in raw], torch.Generator().manual_seed(seed))


def logits(rows: int = 1, seed: int = 3) -> torch.Tensor:
    """Some."""
    return torch.randn((rows, VOCAB), generator=torch.Generator().manual_seed(seed)) * 2


def drawn(raw: dict[str, Any], times: int = 2000) -> torch.Tensor:
    """How often each token was drawn from `logits()`."""
    ids, _ = sampler(*[raw] * times).draw(logits().expand(times, -1), torch.zeros(times, dtype=torch.int64))
    return torch.bincount(ids, minlength=VOCAB) / times


def test_logprobs_are_after_temperature() -> None:
    ids, found = sampler({"temperature": 0.5}).draw(logits(), torch.zeros(1))
    wanted = (logits() / 0.5).log_softmax(-1)[0, ids[0]]
    assert found[0] == pytest.approx(wanted.item(), abs=1e-5)


def test_temperature_zero_is_greedy_and_counts_as_one() -> None:
    ids, found = sampler({"temperature": 0}, {"temperature": 1}).draw(logits(2), torch.zeros(2))
    assert ids[0] == logits(2)[0].argmax()
    assert found[0] == pytest.approx(logits(2)[0].log_softmax(-1).max().item(), abs=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_the_model_says(temperature: float) -> None:
    wanted = (logits()[0] / temperature).softmax(-1)
    assert (drawn({"temperature": temperature}) - wanted).abs().max() < 0.04


def test_seeded_tokens_come_as_often_as_the_model_says() -> None:
    params = [{"sampling_seed": seed} for seed in range(2000)]
    ids, _ = sampler(*params).draw(logits().expand(2000, -1), torch.arange(2000))
    assert (torch.bincount(ids, minlength=VOCAB) / 2000 - logits()[0].softmax(-1)).abs().max() < 0.04


def test_a_seeded_answer_depends_on_seed_and_position_alone() -> None:
    seeded = {"sampling_seed": 42, "temperature": 1.0}
    alone = sampler(seeded, seed=1).draw(logits(1), torch.tensor([9]))[0][0]
    rows = torch.cat((logits(1), logits(3, seed=8)))
    batch = sampler(seeded, {"temperature": 0.5}, {}, {}, seed=2).draw(rows, torch.tensor([9, 1, 2, 3]))[0][0]
    assert alone == batch
    many = [int(sampler(seeded).draw(logits(1), torch.tensor([position]))[0][0]) for position in range(40)]
    assert len(set(many)) > 5


@pytest.mark.parametrize("raw", [{"temperature": 0}, {}, {"sampling_seed": 1}])
def test_nan_gives_token_zero(raw: dict[str, Any]) -> None:
    ids, logprobs = sampler(raw).draw(torch.full((1, VOCAB), float("nan")), torch.zeros(1, dtype=torch.int64))
    assert ids.tolist() == [0]
    assert logprobs.isnan().all()


def test_defaults_and_nulls_are_those_of_sglang() -> None:
    assert SamplingParams.parse({}) == SamplingParams(max_new_tokens=128, temperature=1.0)
    assert SamplingParams.parse({"max_new_tokens": None, "temperature": None}).max_new_tokens is None
    assert SamplingParams.parse({"temperature": 0}).greedy


def test_neutral_values_of_what_is_not_computed_are_accepted() -> None:
    neutral = {
        "stop": None,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_p": 0,
        "top_k": -1,
        "top_p": 1.0,
        "min_new_tokens": 0,
        "n": 1,
        "skip_special_tokens": False,
    }
    assert SamplingParams.parse(neutral) == SamplingParams()


def test_any_top_k_from_the_size_of_the_vocabulary_on_means_all_tokens() -> None:
    bounds = Bounds(vocab_size=VOCAB, context_length=64)
    for top_k in (VOCAB, VOCAB + 1, 2**30, 100_000_000):  # the last two are SGLang's and AReaL's
        body = GenerateBody(input_ids=[1], sampling_params={"top_k": top_k, "max_new_tokens": 4})
        assert [request.params for request in requests_of(body, bounds)] == [SamplingParams(max_new_tokens=4)]
    body = GenerateBody(input_ids=[1], sampling_params={"top_k": VOCAB - 1, "max_new_tokens": 4})
    with pytest.raises(ValueError, match="top_k is not supported"):
        requests_of(body, bounds)


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
