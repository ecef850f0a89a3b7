"""Answers equal to those of Hugging Face transformers on the same checkpoint, token for token."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.utils import logging

from refitd_embedded.engine import EmbeddedEngine
from refitd_embedded.runner import GenerationRequest, SamplingParams
from refitd_embedded.weights import load
from support.embedded_kit import SIZES, open_engine

NEW = 24
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "llama-tied-biased": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 16,
    },
}
MARGIN = {"float32": 1e-3, "bfloat16": 0.07}
"""Logits closer than this are a coin toss in that precision: rounding depends on the shapes of matrices."""
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.06}


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def make(directory: Path, model: str, dtype: str) -> "transformers.PreTrainedModel":
    """A random model, saved and loaded with transformers. Biases are not zero, or they would prove nothing."""
    sizes = {name: value for name, value in SIZES.items() if name not in ("model_type", "rope_theta")}
    changes = dict(MODELS[model])
    kind = changes.pop("model_type")
    config = transformers.AutoConfig.for_model(kind, **(sizes | changes | {"initializer_range": 0.2, "dtype": dtype}))
    torch.manual_seed(sorted(MODELS).index(model))
    made = transformers.AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    made.save_pretrained(directory)
    # Loaded again: `.to(bfloat16)` above rounded the rotary frequencies, loading does not.
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)


def prompts() -> list[list[int]]:
    """Of many lengths, so that padding, grouping and compaction of the batch all happen."""
    torch.manual_seed(7)
    return [torch.randint(0, SIZES["vocab_size"], (length,)).tolist() for length in (1, 2, 3, 5, 8, 13, 40, 17, 4, 9)]


def expected(model: "transformers.PreTrainedModel", prompt: list[int], margin: float) -> tuple[list[int], list[float]]:
    """The greedy answer up to the first coin toss, and the log-probabilities of its tokens."""
    with torch.no_grad():
        generated = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
    tokens, logprobs = [], []
    for logits in generated.logits:
        best, second = logits[0].float().topk(2).values.tolist()
        if best - second < margin:
            break
        tokens.append(int(logits[0].argmax()))
        logprobs.append(float(logits[0].float().log_softmax(-1).max()))
    return tokens, logprobs


async def answers(engine: EmbeddedEngine, many: list[list[int]]) -> list[GenerationRequest]:
    """All in one batch, with answers of different lengths."""
    requests = [
        GenerationRequest(
            rid=str(number),
            prompt=prompt,
            params=SamplingParams.parse({"max_new_tokens": NEW - number, "temperature": 0}),
            return_logprob=True,
        )
        for number, prompt in enumerate(many)
    ]
    async with engine, engine.admitted(requests) as progress:
        await progress.done()
    return requests


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
async def test_a_ragged_batch_is_answered_as_transformers_answers_each_prompt(
    tmp_path: Path, model: str, dtype: str
) -> None:
    theirs = make(tmp_path, model, dtype)
    compared = 0
    for ours in await answers(open_engine(tmp_path), prompts()):
        tokens, logprobs = expected(theirs, ours.prompt, MARGIN[dtype])
        length = min(len(tokens), len(ours.output))
        assert ours.output[:length] == tokens[:length]
        assert ours.output_logprobs[:length] == pytest.approx(logprobs[:length], abs=TOLERANCE[dtype])
        compared += length
    assert compared > 60, "too many coin tosses to prove anything"


@pytest.mark.parametrize("model", MODELS)
def test_gradients_and_names_are_those_of_transformers(tmp_path: Path, model: str) -> None:
    """A trainer on `Decoder` takes the step that one on transformers would take."""
    theirs, ours = make(tmp_path, model, "float32"), load(tmp_path)
    names = {name for name in theirs.state_dict() if not (name == "lm_head.weight" and "tied" in model)}
    assert ours.state_dict().keys() == names
    ids = torch.tensor([prompts()[6]])
    for one in (theirs, ours):
        logits = one(ids).logits if one is theirs else one(ids)
        torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).backward()
    wanted = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=1e-3, atol=1e-5)
