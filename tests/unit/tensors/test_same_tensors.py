"""What was made of a state dict is used again for the same tensors, and never for others."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from refitd_client.errors import InvalidWeightsError
from refitd_client.tensors import casts
from refitd_client.write.content import Content, WeightsReader

State = dict[str, Any]


def reading(**choices: Any) -> WeightsReader:
    given: dict[str, Any] = {"base_model": None, "max_shard_bytes": None, "check_finite": True, "casts": casts(None)}
    return WeightsReader(**given | {"rename": None, "fingerprinted": False} | choices)


def state() -> State:
    return {"w": torch.arange(12.0).reshape(3, 4), "bias": torch.ones(4), "whole": torch.arange(5)}


def read(content: Content) -> dict[str, bytes]:
    return {source.entry.name: source.read().tobytes() for source in content.weights.sources}  # type: ignore[attr-defined]


def test_the_same_tensors_are_looked_at_once() -> None:
    """They are other objects at each step, as a module's `state_dict` makes them; what is read is what is there now."""
    publisher, tensors = reading(), state()
    first = publisher.content(tensors)
    publisher.release()
    tensors["w"][0, 0] = 7
    again = publisher.content({name: tensor.detach() for name, tensor in tensors.items()})
    assert again.weights is first.weights
    assert again.index is first.index
    assert read(again) == {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def test_no_tensor_is_kept_between_two_steps() -> None:
    """The trainer may let go of its model, and wants its memory then."""
    publisher, tensors = reading(casts=casts({"bias": torch.bfloat16})), state()
    publisher.content(tensors)
    kept = [weakref.ref(tensor) for tensor in tensors.values()]
    publisher.release()
    del tensors
    gc.collect()
    assert [each() for each in kept] == [None] * 3


OTHERS: dict[str, Callable[[State], State]] = {
    "elsewhere": lambda old: old | {"w": old["w"].clone()},
    "another dtype": lambda old: old | {"w": old["w"].view(torch.int32)},
    "another shape": lambda old: old | {"w": old["w"].view(4, 3)},
    "other strides": lambda old: old | {"w": old["w"].as_strided((3, 4), (1, 3))},
    "negated": lambda old: old | {"w": torch._neg_view(old["w"])},
    "another name": lambda old: {"v": old["w"], "bias": old["bias"], "whole": old["whole"]},
    "another order": lambda old: dict(reversed(old.items())),
    "one more": lambda old: old | {"more": torch.ones(2)},
    "one less": lambda old: {"w": old["w"], "bias": old["bias"]},
    "an array": lambda old: old | {"bias": old["bias"].numpy()},
}


@pytest.mark.parametrize("change", OTHERS)
def test_other_tensors_are_looked_at(change: str) -> None:
    publisher, tensors = reading(), state()
    publisher.content(tensors)
    changed = OTHERS[change](tensors)
    content = publisher.content(changed)
    assert read(content) == read(reading().content(changed))
    assert content.weights.tensors == reading().content(changed).weights.tensors


@pytest.mark.parametrize("bad", [torch.ones(4).to_sparse(), torch.ones(4, device="meta"), "text", None])
def test_what_cannot_be_published_is_refused_after_what_can_as_well(bad: Any) -> None:
    publisher, tensors = reading(), state()
    publisher.content(tensors)
    with pytest.raises(InvalidWeightsError, match="tensor bias"):
        publisher.content(tensors | {"bias": bad})
    assert read(publisher.content(tensors)) == read(reading().content(tensors))


def test_names_are_asked_for_at_each_step() -> None:
    prefix = "a."
    publisher, tensors = reading(rename=lambda name: prefix + name), state()
    assert read(publisher.content(tensors)).keys() == {"a.w", "a.bias", "a.whole"}
    prefix = "b."
    assert read(publisher.content(tensors)).keys() == {"b.w", "b.bias", "b.whole"}
    publisher = reading(rename={"bias": None})
    assert read(publisher.content(tensors)) == read(publisher.content(tensors))
    assert read(publisher.content(tensors)).keys() == {"w", "whole"}
