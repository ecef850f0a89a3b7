"""The memory of trainer and engine: the known case, published parameter counts, what autograd really keeps."""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from refitd_client import PlanRefusedError
from refitd_plan.allocation import Parallel, Role, parse
from refitd_plan.fit import KNOBS, changes
from refitd_plan.job import JobSettings
from refitd_plan.machine import Gpu, Machine, place
from refitd_plan.memory import HeldParameters, MemoryEstimate, default_fraction, held_by, layer_bytes, memory_of
from refitd_plan.model import Model, model_of, read_model
from refitd_plan.plan import PlannedMemory
from refitd_plan.planner import plan
from support.planning_page import AS_MENDED, AS_REPORTED, BEGIN, CASES, CONFIGS, END, ONE, PAGE, table

A40 = 44.42


CHECKPOINTED = {"gradient_checkpointing": True}


def small() -> Model:
    return model_of(CONFIGS["Qwen2.5-0.5B"])[0]


def memory(model: str, gpu_memory: float, allocation: str = ONE, gpus: int = 1, **settings: Any) -> PlannedMemory:
    made = plan(allocation, gpus_per_node=gpus, gpu_memory=gpu_memory, nodes=1, model=CONFIGS[model], **settings)
    assert made.memory is not None
    return made.memory


def of(role: Role, found: PlannedMemory) -> float:
    return next(process.total for process in found.processes if process.role == role)


class TestTheKnownCase:
    """An A40, Qwen2.5-0.5B, everything on one GPU: what was reported, and what it ran with."""

    def test_it_does_not_fit_as_reported(self) -> None:
        """SGLang held 36.34 GiB; the trainer had 8.05 GiB, wanted more, and would have needed more yet."""
        found = memory("Qwen2.5-0.5B", A40, **AS_REPORTED)
        assert not found.fits
        assert of(Role.GENERATION, found) == pytest.approx(36.34, rel=0.1)
        assert of(Role.TRAINING, found) > 8.05 + 48 / 1024

    def test_it_fits_as_mended(self) -> None:
        """About 22 and 6 GiB, 28 together. Both parts are the report's own estimates, and 6 is rounded down."""
        found = memory("Qwen2.5-0.5B", A40, **AS_MENDED)
        assert found.fits
        assert of(Role.GENERATION, found) == pytest.approx(22, rel=0.1)
        assert of(Role.TRAINING, found) == pytest.approx(6, rel=0.15)
        assert sum(process.total for process in found.processes) == pytest.approx(28, rel=0.1)

    def test_the_smallest_set_of_changes_is_smaller_than_what_was_done(self) -> None:
        found = memory("Qwen2.5-0.5B", A40, **AS_REPORTED)
        assert found.changes is not None
        assert 1 <= len(found.changes) < 6
        assert sum(process.total for process in found.after) <= A40 * 0.95


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.gpu} {case.model} {case.allocation}")
def test_a_plan_that_does_not_fit_says_what_does(case: Any) -> None:
    found = case.plan().memory
    assert found.fits == (not found.faults)
    assert (found.changes == ()) == found.fits
    if found.changes:
        assert all(change.saves > -0.01 for change in found.changes)
        again = replace(case, settings={**case.settings, **{change.setting: change.value for change in found.changes}})
        assert again.plan().memory.fits


def test_the_page_has_the_table_of_the_known_cases() -> None:
    """`PYTHONPATH=tests python -m support.planning_page` writes it anew."""
    assert PAGE.read_text().partition(BEGIN)[2].partition(END)[0] == table()


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("Qwen2.5-0.5B", 494_032_768),
        ("Qwen2.5-1.5B", 1_543_714_304),
        ("Qwen2.5-7B", 7_615_616_512),
        ("Qwen3-8B", 8_190_735_360),
        ("Qwen3-30B-A3B", 30_532_122_624),
        ("Mixtral-8x7B", 46_702_792_704),
        ("DeepSeek-V2-Lite", 15_706_484_224),
    ],
)
def test_parameters_are_counted_as_they_are_published(model: str, parameters: int) -> None:
    assert model_of(CONFIGS[model])[0].parameters == parameters


def _stored(config: Any, tokens: int) -> int:
    """Bytes that a forward pass leaves behind for the backward pass, beside the weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no other gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(input_ids=torch.arange(tokens)[None] % 500, use_cache=False)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("kind", ["Qwen2Config", "Qwen3Config"])
def test_a_layer_keeps_what_autograd_keeps(kind: str) -> None:
    import transformers  # here, because every worker imports this module

    def config(layers: int) -> Any:
        return getattr(transformers, kind)(
            hidden_size=192,
            intermediate_size=448,
            num_hidden_layers=layers,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=64,
            vocab_size=512,
            tie_word_embeddings=True,
        )

    measured = (_stored(config(2), 64) - _stored(config(1), 64)) / 64
    assert layer_bytes(model_of(config(1).to_dict())[0]) == pytest.approx(measured, rel=0.01)


def test_the_kv_cache_is_counted_by_heads_and_ranks() -> None:
    qwen, deepseek = model_of(CONFIGS["Qwen3-8B"])[0], model_of(CONFIGS["DeepSeek-V2-Lite"])[0]
    assert qwen.kv_bytes(1, 1) == 2 * 36 * 8 * 128 * 2
    assert qwen.kv_bytes(4, 1) == qwen.kv_bytes(1, 1) / 4
    assert qwen.kv_bytes(16, 1) == qwen.kv_bytes(8, 1), "a head is never cut"
    assert deepseek.kv_bytes(8, 1) == (512 + 64) * 27 * 2, "a latent vector is whole on each rank"


@pytest.mark.parametrize(("capacity", "share"), [(23.64, 0.716), (44.42, 0.849), (79.15, 0.834), (139.8, 0.906)])
def test_sglang_s_own_choice_of_its_share(capacity: float, share: float) -> None:
    """As `handle_gpu_memory_settings` of SGLang 0.5 computes it, by hand."""
    assert default_fraction(capacity, Parallel(), JobSettings()) == pytest.approx(share, abs=0.001)


def test_data_parallel_ranks_share_weights_and_optimizer() -> None:
    one = memory("Qwen3-8B", 140, "sglang:d1+fsdp:d1", 2, gradient_checkpointing=True, batch_size=64)
    four = memory("Qwen3-8B", 140, "sglang:d4+fsdp:d4", 8, gradient_checkpointing=True, batch_size=64)

    def part(found: PlannedMemory, name: str) -> float:
        return next(process.parts[name] for process in found.processes if process.role == Role.TRAINING)

    for name in ("weights", "gradients", "optimizer"):
        assert part(four, name) == pytest.approx(part(one, name) / 4, abs=0.01)
    assert part(four, "activations") == part(one, "activations")
    few = memory("Qwen3-8B", 140, "sglang:d4+fsdp:d4", 8, gradient_checkpointing=True, batch_size=4)
    assert part(few, "activations") < part(four, "activations"), "a rank has its share of the batch and no more"


def test_megatron_cuts_experts_by_their_own_tensor_parallelism_and_adds_gradients_up_in_fp32() -> None:
    model = model_of(CONFIGS["Qwen3-30B-A3B"])[0]

    def held(text: str) -> HeldParameters:
        return held_by(model, parse(f"sglang:d4+{text}").of(Role.TRAINING)[0], JobSettings())

    cut, whole, spread = (held(text) for text in ("megatron:d1t4", "megatron:d4", "megatron:(attn:d1p1t4|ffn:e2)"))
    assert cut.weights > model.expert_parameters, "attention's tensor parallelism cuts no expert"
    assert cut.state == pytest.approx(whole.state, rel=0.01), "each element's state is kept once"
    assert spread.weights == pytest.approx(cut.weights - model.expert_parameters / 2)
    found = memory("Qwen3-30B-A3B", 140, "sglang:d2t2+megatron:(attn:d1p2t2|ffn:d1p2e2)", 8)
    parts = next(process.parts for process in found.processes if process.role == Role.TRAINING)
    assert parts["gradients"] == pytest.approx(2 * parts["weights"], rel=0.01)


def test_engines_of_adapters_keep_room_for_them() -> None:
    lora, full = memory("Qwen3-8B", 140, lora_rank=16), memory("Qwen3-8B", 140)
    pools = [next(p.parts for p in found.processes if p.role == Role.GENERATION) for found in (lora, full)]
    # 8 adapters of rank 16: 36 layers of q and o (4096 + 4096), k and v (4096 + 1024), three of the MLP, in bf16
    assert pools[0]["adapters"] * 2**30 == pytest.approx(8 * 2 * 16 * 36 * (2 * 8192 + 2 * 5120 + 3 * 16384), abs=2e6)
    assert pools[0]["KV cache"] + pools[0]["adapters"] == pytest.approx(pools[1]["KV cache"], abs=0.01)


def test_an_engine_is_not_starved_where_one_change_more_would_do() -> None:
    found = memory("Qwen2.5-1.5B", 39.4, **AS_REPORTED)
    assert found.changes is not None
    assert "gradient_checkpointing" in [change.setting for change in found.changes]
    assert next(c.value for c in found.changes if c.setting == "mem_fraction_static") > 0.2  # pyright: ignore[reportOperatorIssue]


def test_a_reference_model_is_a_second_copy_of_the_weights_and_none_with_adapters() -> None:
    def parts(**settings: Any) -> tuple[float, Any]:
        found = memory("Qwen3-8B", 140, "sglang:d2+fsdp:d2", 4, **settings)
        of_trainer = next(process.parts for process in found.processes if process.role == Role.TRAINING)
        return of_trainer["weights"], of_trainer.get("reference model")

    for precision in ("bf16", "fp32"):
        weights, reference = parts(precision=precision, reference_model=True)
        assert reference == weights
    assert parts()[1] is None
    assert parts(lora_rank=16, reference_model=True)[1] is None, "adapters are switched off in its place"


def _case(capacity: float, **settings: Any) -> tuple[JobSettings, Callable[[JobSettings], MemoryEstimate]]:
    machine = Machine(gpus=(Gpu(memory=capacity),))
    placement = place(parse(ONE), machine)
    model = model_of(CONFIGS["Qwen2.5-1.5B"])[0]
    return JobSettings(**{**AS_REPORTED, **settings}), lambda job: memory_of(model, placement, machine, job, "delta")


@pytest.mark.parametrize("capacity", [24.0, 36.0, 64.0])
def test_no_smaller_set_of_changes_would_do(capacity: float) -> None:
    """Every smaller set of settings is tried at all combinations of ends: none fits, unless it starves the engine."""
    job, measure = _case(capacity)
    found = changes(job, measure, handover=False)
    if not found:
        return
    now = measure(job)
    for smaller in combinations(KNOBS, len(found) - 1):
        for level in range(20):
            turned = {
                knob.setting: levels[min(level, len(levels) - 1) if knob.setting == "mem_fraction_static" else -1]
                for knob in smaller
                if (levels := knob.levels(job, now))
            }
            then = measure(replace(job, **turned))
            assert not then.fits or then.kv_tokens < min(then.kv_wanted, now.kv_tokens) / 2, turned


def test_a_hand_over_excludes_expandable_segments() -> None:
    job, measure = _case(24.0, mem_fraction_static=0.2, gradient_checkpointing=True)
    for handover in (True, False):
        found = changes(job, measure, handover=handover)
        if found and handover:
            assert all(change.setting != "expandable_segments" for change in found)
    made = plan("sglang:d1|fsdp:d1", gpus_per_node=1, gpu_memory=30, model=CONFIGS["Qwen2.5-1.5B"], plugin=True)
    assert made.transport == "handover"
    assert made.memory is not None
    assert all(change.setting != "expandable_segments" for change in made.memory.changes or ())
    assert "PYTORCH_CUDA_ALLOC_CONF" not in made.environment["trainer"]


def test_an_engine_whose_share_is_too_small_for_its_weights_is_told_to_take_more() -> None:
    found = memory("Qwen2.5-7B", 79.15, "sglang:d1+fsdp:d1", 2, lora_rank=8, mem_fraction_static=0.15, **CHECKPOINTED)
    assert "leaves room for nothing" in found.faults[0]
    assert found.changes is not None
    assert [change.setting for change in found.changes] == ["mem_fraction_static"]


@pytest.mark.parametrize("missing", ["hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"])
def test_a_config_without_a_field_is_refused_by_the_field_s_name(tmp_path: Path, missing: str) -> None:
    fields = {name: value for name, value in CONFIGS["Qwen3-8B"].items() if name != missing}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(fields))
    with pytest.raises(PlanRefusedError, match=f"'{missing}'"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("hidden_size", -1), ("vocab_size", 10**15), ("num_hidden_layers", "many"), ("hidden_size", True)),
        *(("num_experts", "many"), ("num_experts_per_tok", "2"), ("n_shared_experts", "one")),
    ],
)
def test_an_absurd_field_is_refused_by_its_name(field: str, value: object) -> None:
    with pytest.raises(PlanRefusedError, match=field):
        model_of({**CONFIGS["Qwen3-30B-A3B"], field: value})


def test_a_model_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanRefusedError, match=r"config\.json"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(PlanRefusedError, match="no JSON"):
        read_model(tmp_path)


def test_what_a_configuration_leaves_open_is_assumed_aloud() -> None:
    _, assumed = model_of({name: v for name, v in CONFIGS["Qwen3-8B"].items() if name != "num_key_value_heads"})
    assert any("num_key_value_heads" in text for text in assumed)
    inner, assumed = model_of({"model_type": "vl", "text_config": dict(CONFIGS["Qwen3-8B"])})
    assert inner.parameters == 8_190_735_360
    assert any("text_config" in text for text in assumed)


@pytest.mark.parametrize(
    ("more", "named"),
    [({"model_type": "mamba"}, "'mamba'"), ({"quantization_config": {"bits": 8}}, "quantization_config")],
)
def test_what_is_not_counted_as_it_is_is_assumed_aloud(more: dict[str, object], named: str) -> None:
    assert model_of(CONFIGS["Qwen3-8B"])[1] == []
    assert any(named in text for text in model_of({**CONFIGS["Qwen3-8B"], **more})[1])


def test_a_broadcast_of_refitds_has_a_receiver_beside_each_engine_rank_and_one_sender() -> None:
    found = memory("Qwen2.5-0.5B", A40, "sglang:d2+fsdp:d1", 3, plugin=True)
    beside = {name for process in found.processes for name in process.parts if name in {"receiver", "sender"}}
    assert beside == {"receiver", "sender"}
    assert [("receiver" in each.parts, "sender" in each.parts) for each in found.processes] == [
        (True, False),
        (True, False),
        (False, True),
    ]
    assert all("sender" not in each.parts for each in memory("Qwen2.5-0.5B", A40, "sglang:d2+fsdp:d1", 3).processes)
