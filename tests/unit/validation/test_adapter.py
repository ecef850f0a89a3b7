"""LoRA adapters: what is held against the model before an engine hears of it."""

import json
from collections.abc import Mapping

import pytest

from refitd_client.checkpoint.inventory import Inventory, Reference, Tensor
from refitd_client.validation.lora import AdapterConfig, AdapterRefusedError, adapter_faults, is_adapter, parse_adapter

MODEL = {"model.q.weight": Tensor("BF16", (8, 16)), "model.norm.weight": Tensor("BF16", (16,))}
REFERENCE = Reference(Inventory(MODEL), tied=False, source="/base")
A, B = "base_model.model.model.q.lora_A.weight", "base_model.model.model.q.lora_B.weight"
GOOD = {A: Tensor("F32", (4, 16)), B: Tensor("F32", (8, 4))}
PLAIN = {"peft_type": "LORA", "r": 4}


def faults(tensors: Mapping[str, Tensor], config: AdapterConfig | None = None) -> list[str]:
    found = adapter_faults(config or AdapterConfig(peft_type="LORA", r=4), Inventory(tensors), REFERENCE)
    return [fault.reason for fault in found]


def test_pairs_that_fit_the_model_have_no_fault() -> None:
    assert faults(GOOD) == []


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({}, "was the adapter trained"),
        ({A: GOOD[A]}, "lora_A alone"),
        ({A: GOOD[A], B: Tensor("F32", (9, 4))}, "[9, 4] where the model and rank 4 want [8, 4]"),
        ({A: Tensor("F32", (5, 16)), B: Tensor("F32", (8, 5))}, "[5, 16]"),
        ({A: Tensor("I8", (4, 16)), B: GOOD[B]}, "save it in BF16"),
        ({**GOOD, "base_model.model.lm_head.weight": GOOD[A]}, "no lora_A or lora_B"),
        ({name.replace("model.q", "model.other"): tensor for name, tensor in GOOD.items()}, "model.other"),
        ({name.replace("model.q", "model.norm"): tensor for name, tensor in GOOD.items()}, "no linear layer"),
    ],
)
def test_what_does_not_fit_is_named(tensors: Mapping[str, Tensor], named: str) -> None:
    assert any(named in reason for reason in faults(tensors)), faults(tensors)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"r": 0}, "rank 0"),
        ({"use_dora": True}, "use_dora"),
        ({"use_rslora": True}, "use_rslora"),
        ({"alpha_pattern": {"q_proj": 32}}, "alpha_pattern"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"bias": "all"}, "biases"),
        ({"modules_to_save": ["lm_head"]}, "whole modules"),
        ({"r": "four"}, "does not parse"),
    ],
)
def test_adapters_that_engines_would_take_for_others_are_refused(more: dict[str, object], named: str) -> None:
    with pytest.raises(AdapterRefusedError, match=named):
        parse_adapter(json.dumps(PLAIN | more).encode())


def test_peft_s_empty_patterns_are_no_patterns() -> None:
    assert parse_adapter(json.dumps(PLAIN | {"rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False}).encode())


def test_an_adapter_s_folder_is_told_from_a_model_s() -> None:
    assert is_adapter({"adapter_config.json", "adapter_model.safetensors", "README.md"})
    assert not is_adapter({"adapter_config.json", "adapter_model.safetensors", "model.safetensors"})
    assert not is_adapter({"adapter_model.safetensors"})
