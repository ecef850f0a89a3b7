"""The known cases of docs/planning.md: their configurations, and the table that the page shows of them.

PYTHONPATH=tests python -m support.planning_page     writes the table into the page anew
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refitd_plan.plan import Plan
from refitd_plan.planner import plan

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"
BEGIN, END = "<!-- the table is written by tests/support/planning_page.py -->\n", "<!-- end of the table -->"

_COMMON = {"tie_word_embeddings": False, "max_position_embeddings": 32768}
_QWEN2 = {**_COMMON, "model_type": "qwen2", "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "Qwen2.5-0.5B": {
        **_QWEN2,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    },
    "Qwen2.5-1.5B": {
        **_QWEN2,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
    },
    "Qwen2.5-7B": {
        **_COMMON,
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "Qwen3-8B": {
        **_COMMON,
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "Qwen3-30B-A3B": {
        **_COMMON,
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "Mixtral-8x7B": {
        **_COMMON,
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "DeepSeek-V2-Lite": {
        **_COMMON,
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "vocab_size": 102400,
    },
}

AS_REPORTED: Mapping[str, Any] = {
    "gradient_checkpointing": False,
    "mem_fraction_static": 0.8,
    "batch_size": 8,
    "samples": 4,
    "max_new_tokens": 512,
    "micro_batch_tokens": 5120,
    "concurrent_rollouts": 32,
    "context_length": 4096,
}
AS_MENDED: Mapping[str, Any] = {
    "gradient_checkpointing": True,
    "expandable_segments": True,
    "mem_fraction_static": 0.5,
    "batch_size": 4,
    "samples": 4,
    "max_new_tokens": 256,
    "micro_batch_tokens": 4096,
    "concurrent_rollouts": 16,
    "context_length": 4096,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row: a GPU by its memory (what programs can have of it), a model, an allocation, settings."""

    gpu: str
    memory: float
    gpus: int
    model: str
    allocation: str
    settings: Mapping[str, Any]
    note: str

    def plan(self) -> Plan:
        """The plan of this case."""
        return plan(
            self.allocation,
            gpus_per_node=self.gpus,
            gpu_memory=self.memory,
            nodes=1,
            plugin=False,
            model=CONFIGS[self.model],
            **self.settings,
        )


ONE = "sglang.d1p1t1+d1p1t1"
CHECKPOINTED = {**AS_REPORTED, "gradient_checkpointing": True}
CASES = (
    Case(
        gpu="A40", memory=44.42, gpus=1, model="Qwen2.5-0.5B", allocation=ONE, settings=AS_REPORTED, note="as reported"
    ),
    Case(gpu="A40", memory=44.42, gpus=1, model="Qwen2.5-0.5B", allocation=ONE, settings=AS_MENDED, note="as mended"),
    Case(gpu="RTX 4090", memory=23.64, gpus=1, model="Qwen2.5-0.5B", allocation=ONE, settings=AS_REPORTED, note=""),
    Case(gpu="RTX 4090", memory=23.64, gpus=1, model="Qwen2.5-1.5B", allocation=ONE, settings=AS_REPORTED, note=""),
    Case(gpu="A100 40 GB", memory=39.4, gpus=1, model="Qwen2.5-1.5B", allocation=ONE, settings=AS_REPORTED, note=""),
    Case(gpu="A100 80 GB", memory=79.2, gpus=1, model="Qwen2.5-1.5B", allocation=ONE, settings=AS_REPORTED, note=""),
    Case(
        gpu="A100 80 GB",
        memory=79.2,
        gpus=1,
        model="Qwen3-8B",
        allocation=ONE,
        settings={**CHECKPOINTED, "lora_rank": 32},
        note="LoRA, rank 32",
    ),
    Case(
        gpu="H100", memory=79.1, gpus=8, model="Qwen3-8B", allocation="sglang:d4+fsdp:d4", settings=AS_REPORTED, note=""
    ),
    Case(
        gpu="H100",
        memory=79.1,
        gpus=8,
        model="Qwen2.5-7B",
        allocation="sglang:d8|fsdp:d8",
        settings={**CHECKPOINTED, "precision": "mixed"},
        note="fp32 master weights",
    ),
    Case(gpu="H200", memory=139.8, gpus=1, model="Qwen2.5-7B", allocation=ONE, settings=AS_REPORTED, note=""),
    Case(
        gpu="H200",
        memory=139.8,
        gpus=8,
        model="Qwen3-30B-A3B",
        allocation="sglang:d2t2+megatron:(attn:d1p2t2|ffn:d1p2e2)",
        settings=CHECKPOINTED,
        note="experts",
    ),
    Case(gpu="any, 95 GiB", memory=95.0, gpus=1, model="Qwen2.5-1.5B", allocation=ONE, settings=AS_REPORTED, note=""),
)


def table() -> str:
    """The table, as the page has it."""
    head = "| GPU | model | allocation | transport | engine | trainer | fits | it fits with |"
    return "\n".join([head, "|---|---|---|---|---|---|---|---|", *(_row(case) for case in CASES)]) + "\n"


def _row(case: Case) -> str:
    made = case.plan()
    memory = made.memory
    assert memory is not None
    engine = max(process.total for process in memory.processes if process.role == "generation")
    trainer = max(process.total for process in memory.processes if process.role == "training")
    number = f"{case.gpus} x " if case.gpus > 1 else ""
    note = f" ({case.note})" if case.note else ""
    allocation = case.allocation.replace("|", "\\|")
    return (
        f"| {number}{case.gpu}, {case.memory:g} GiB | {case.model}{note} | `{allocation}` | {made.transport} "
        f"| {engine:.1f} | {trainer:.1f} | {'yes' if memory.fits else 'no'} | {_changes(made)} |"
    )


def _changes(made: Plan) -> str:
    assert made.memory is not None
    if made.memory.fits:
        return ""
    if made.memory.changes is None:
        return "nothing of it"
    return ", ".join(f"{change.setting} {change.value} (-{change.saves:.1f})" for change in made.memory.changes)


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}")
