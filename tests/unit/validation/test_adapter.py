"""LoRA adapters: what is held against the model before an engine hears of it."""

import json
from collections.abc import Mapping

import pytest
from peft import LoraConfig

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
        ({**GOOD, "base_model.model.lm_head.weight": GOOD[A]}, "save_embedding_layers=False"),
        ({**GOOD, A.replace("lora_A.weight", "lora_magnitude_vector"): GOOD[A]}, "lose what it has learned: merge it"),
        ({**GOOD, "base_model.model.model.e.token_adapter.trainable_tokens_delta": GOOD[A]}, "lose what it has"),
        ({A.replace("A.", "A.default."): GOOD[A]}, "engines read base_model.model.model.q.lora_A.weight"),
        ({A.removeprefix("base_model.model."): GOOD[A]}, "engines read base_model.model.model.q.lora_A.weight"),
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
        ({"use_rslora": True}, r"use_rslora.*lora_alpha by sqrt"),
        ({"alpha_pattern": {"q_proj": 32}}, "alpha_pattern"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"bias": "all"}, "biases"),
        ({"modules_to_save": ["lm_head"]}, "whole modules"),
        ({"r": "four"}, "does not parse"),
        ({"trainable_token_indices": {"embed_tokens": [3]}}, "trainable_token_indices.*lose"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
        ({"alora_invocation_tokens": [3, 4]}, "alora_invocation_tokens"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters"),
        ({"lora_bias": True}, "lora_bias"),
        ({"use_qalora": True}, "use_qalora"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
        ({"arrow_config": {"top_k": 3}}, "arrow_config"),
        ({"kasa_config": {"beta": 0.1}}, "kasa_config"),
        ({"vllm_lora_scaling_factor": 3.0}, "'vllm_lora_scaling_factor', which this release"),
        ({"some_next_thing": {"on": True}}, "'some_next_thing', which this release"),
    ],
)
def test_adapters_that_engines_would_take_for_others_are_refused(more: dict[str, object], named: str) -> None:
    with pytest.raises(AdapterRefusedError, match=named) as refused:
        parse_adapter(json.dumps(PLAIN | more).encode())
    assert len(str(refused.value)) <= 240


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "PiSSA", "olora", "corda", "loftq", "lora_ga", "next"])
def test_an_adapter_that_changed_its_base_model_is_refused_with_peft_s_way_out(init: str) -> None:
    with pytest.raises(AdapterRefusedError, match=f"'{init}'.*path_initial_model_for_weight_conversion") as refused:
        parse_adapter(json.dumps(PLAIN | {"init_lora_weights": init}).encode())
    assert len(str(refused.value)) <= 240


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_an_adapter_that_leaves_its_base_model_as_it_is_passes(init: object) -> None:
    assert parse_adapter(json.dumps(PLAIN | {"init_lora_weights": init}).encode())


def test_peft_s_own_defaults_and_what_is_of_the_training_alone_pass() -> None:
    config = LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear", exclude_modules=["lm_head"])
    saved = config.to_dict() | {"peft_type": "LORA", "exclude_modules": ["lm_head"], "corda_config": {"verbose": True}}
    assert parse_adapter(json.dumps(saved).encode()).r == 4


STORED: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
    "awq": {"qweight": ("I32", (64, 4)), "qzeros": ("I32", (1, 4)), "scales": ("F16", (1, 32))},
    "gptq": {"qweight": ("I32", (8, 32)), "qzeros": ("I32", (1, 4)), "scales": ("F16", (1, 32))},
    "gptq-order": {"qweight": ("I32", (8, 32)), "scales": ("F16", (1, 32)), "g_idx": ("I32", (64,))},
    "gptq-8-bit": {"qweight": ("I32", (16, 32)), "qzeros": ("I32", (1, 8)), "scales": ("F16", (1, 32))},
    "nvfp4": {"weight": ("U8", (32, 32)), "weight_scale": ("F8_E4M3", (32, 4)), "weight_scale_2": ("F32", ())},
    "packed-fp4": {"weight_packed": ("U8", (32, 32)), "weight_scale": ("F8_E4M3", (32, 4))},
    "fp8": {"weight": ("F8_E4M3", (32, 64)), "weight_scale_inv": ("F32", (1, 1))},
    "int8": {"weight": ("I8", (32, 64)), "SCB": ("F32", (32,))},
}
UNSEEN: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
    "bitsandbytes": {"weight": ("U8", (1024, 1)), "weight.absmax": ("U8", (32,))},
    "hqq": {"W_q": ("U8", (1024, 2)), "meta": ("U8", (4,))},
}


def of_quantised(
    stored: Mapping[str, tuple[str, tuple[int, ...]]], a: tuple[int, ...], b: tuple[int, ...]
) -> list[str]:
    model = {f"model.q.{name}": Tensor(dtype, shape) for name, (dtype, shape) in stored.items()}
    config, tensors = AdapterConfig(peft_type="LORA", r=4), {A: Tensor("BF16", a), B: Tensor("BF16", b)}
    reference = Reference(Inventory(model), tied=False, source="/quantised")
    return [fault.reason for fault in adapter_faults(config, Inventory(tensors), reference)]


@pytest.mark.parametrize("form", STORED)
def test_an_adapter_is_held_against_the_logical_shape_of_a_quantised_layer(form: str) -> None:
    assert of_quantised(STORED[form], (4, 64), (32, 4)) == []
    assert of_quantised(STORED[form], (4, 32), (32, 4))
    assert of_quantised(STORED[form], (4, 64), (64, 4))


def test_a_size_that_a_packed_layer_does_not_show_is_not_held_against_an_adapter() -> None:
    packed = {"weight_packed": ("I32", (32, 8)), "weight_scale": ("BF16", (32, 1)), "weight_shape": ("I64", (2,))}
    assert of_quantised(packed, (4, 64), (32, 4)) == []
    assert of_quantised(packed, (4, 64), (64, 4)) == [
        "model.q.lora_B is [64, 4] where the model and rank 4 want [32, 4]"
    ]
    for stored in UNSEEN.values():
        assert of_quantised(stored, (4, 64), (32, 4)) == []
        assert of_quantised(stored, (5, 64), (32, 5))  # the rank is known all the same


@pytest.mark.parametrize("stored", ["language_model.model.layers.0.q", "model.layers.0.q"])
def test_an_adapter_of_a_module_whose_checkpoint_has_other_names_is_compared_with_its_own_layer(stored: str) -> None:
    vision = {"vision_tower.vision_model.encoder.layers.0.q.weight": Tensor("BF16", (3, 5))}
    model = Reference(
        Inventory({f"{stored}.weight": Tensor("BF16", (8, 16)), **vision}), tied=False, source="/checkpoint"
    )
    tensors = {name.replace("model.q", "model.language_model.layers.0.q"): each for name, each in GOOD.items()}
    config = AdapterConfig(peft_type="LORA", r=4)
    assert list(adapter_faults(config, Inventory(tensors), model)) == []
    wrong = {name: Tensor("F32", (4, 5)) for name in tensors}
    assert list(adapter_faults(config, Inventory(wrong), model))


def test_weights_that_lie_transposed_are_compared_so() -> None:
    model = Reference(Inventory({"model.q.weight": Tensor("F32", (16, 8))}), tied=False, source="/gpt2")
    config = AdapterConfig(peft_type="LORA", r=4, fan_in_fan_out=True)
    assert list(adapter_faults(config, Inventory(GOOD), model)) == []


def test_peft_s_empty_patterns_are_no_patterns() -> None:
    assert parse_adapter(json.dumps(PLAIN | {"rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False}).encode())


def test_an_adapter_s_folder_is_told_from_a_model_s() -> None:
    assert is_adapter({"adapter_config.json", "adapter_model.safetensors", "README.md"})
    assert not is_adapter({"adapter_config.json", "adapter_model.safetensors", "model.safetensors"})
    assert not is_adapter({"adapter_model.safetensors"})
