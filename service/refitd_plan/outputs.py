"""A plan as text to paste: the engine's flags, environment lines, and keys of an AReaL configuration. Pure."""

import copy
from collections.abc import Iterator, Mapping, Sequence

from refitd_plan.allocation import SGLANG, Parallel
from refitd_plan.job import JobSettings
from refitd_plan.plan import PlannedChange
from refitd_plan.transport import WeightTransport

AREAL_KEYS: Mapping[str, str] = {
    "nodes": "cluster.n_nodes",
    "gpus_per_node": "cluster.n_gpus_per_node",
    "gradient_checkpointing": "actor.gradient_checkpointing",
    "micro_batch_tokens": "actor.mb_spec.max_tokens_per_mb",
    "mem_fraction_static": "sglang.mem_fraction_static",
    "context_length": "sglang.context_length",
    "running_requests": "sglang.max_running_requests",
    "attention_backend": "sglang.attention_backend",
    "samples": "gconfig.n_samples",
    "max_new_tokens": "gconfig.max_new_tokens",
    "batch_size": "train_dataset.batch_size",
    "prompt_tokens": "train_dataset.max_length",
    "concurrent_rollouts": "rollout.max_concurrent_rollouts",
}
"""Where AReaL keeps a plan's settings (`areal/api/cli_args.py`). Expandable segments are a variable, no key."""
_AREAL_VLLM: Mapping[str, str] = {
    "mem_fraction_static": "vllm.gpu_memory_utilization",
    "context_length": "vllm.max_model_len",
    "running_requests": "vllm.max_num_seqs",
}


def areal_keys(engine: str) -> Mapping[str, str]:
    """Where AReaL keeps a plan's settings, with an engine of that backend."""
    if engine == SGLANG:
        return AREAL_KEYS
    others = {name: key for name, key in AREAL_KEYS.items() if not key.startswith("sglang.")}
    return {**others, **_AREAL_VLLM}


def sglang_flags(parallel: Parallel, job: JobSettings, fraction: float | None) -> list[str]:
    """The flags of each engine's server.

    Args:
        parallel: the engine's parallelism.
        job: the settings.
        fraction: mem_fraction_static, None where no memory was planned.
    """
    flags: dict[str, object] = {"--tp-size": parallel.t}
    if parallel.p > 1:
        flags["--pp-size"] = parallel.p
    if fraction is not None:
        flags["--mem-fraction-static"] = f"{fraction:g}"
    flags["--context-length"] = job.context_length
    flags["--max-running-requests"] = job.running_requests
    flags["--max-total-tokens"] = job.max_total_tokens
    flags["--kv-cache-dtype"] = "fp8_e5m2" if job.kv_cache_bytes == 1 else None
    flags["--attention-backend"] = job.attention_backend.value
    if job.lora_rank is not None:
        flags["--max-lora-rank"] = job.lora_rank
        flags["--lora-target-modules"] = "all"
    said = [word for name, value in flags.items() if value is not None for word in (name, str(value))]
    switches = [(job.lora_rank is not None, "--enable-lora"), (not job.cuda_graphs, "--disable-cuda-graph")]
    return [*said, *(name for is_on, name in switches if is_on)]


def vllm_flags(parallel: Parallel, job: JobSettings, fraction: float | None) -> list[str]:
    """The flags of each engine's `vllm serve`.

    Args:
        parallel: the engine's parallelism.
        job: the settings.
        fraction: gpu_memory_utilization, None where no memory was planned.
    """
    flags: dict[str, object] = {"--tensor-parallel-size": parallel.t}
    flags["--pipeline-parallel-size"] = parallel.p if parallel.p > 1 else None
    flags["--gpu-memory-utilization"] = None if fraction is None else f"{fraction:g}"
    flags["--max-model-len"] = job.context_length
    flags["--max-num-seqs"] = job.running_requests
    flags["--kv-cache-dtype"] = "fp8" if job.kv_cache_bytes == 1 else None
    flags["--max-lora-rank"] = job.lora_rank
    said = [word for name, value in flags.items() if value is not None for word in (name, str(value))]
    switches = [(job.lora_rank is not None, "--enable-lora"), (not job.cuda_graphs, "--enforce-eager")]
    return [*said, *(name for is_on, name in switches if is_on)]


def environment_lines(environment: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Lines for a shell, under a comment that says whose they are."""
    for whose, variables in environment.items():
        if variables:
            yield f"# {whose}"
            yield from (f"export {name}={value}" for name, value in sorted(variables.items()))


def areal_patch(transport: WeightTransport, made: Sequence[PlannedChange], engine: str = SGLANG) -> dict[str, object]:
    """Keys of an AReaL configuration that differ, nested as in its YAML."""
    mode = "xccl" if transport is WeightTransport.NCCL else "disk"  # on a GPU its xccl is NCCL
    patch: dict[str, object] = {}
    _set(patch, "actor.weight_update_mode", mode)
    for change in made:
        if (key := areal_keys(engine).get(change.setting)) is not None:
            _set(patch, key, change.value)
    return patch


def with_keys(patch: Mapping[str, object], keys: Mapping[str, object]) -> Mapping[str, object]:
    """The patch with more of AReaL's keys, which are dotted."""
    more = copy.deepcopy(dict(patch))
    for key, value in keys.items():
        _set(more, key, value)
    return more


def _set(tree: dict[str, object], path: str, value: object) -> None:
    *parents, last = path.split(".")
    for name in parents:
        tree = tree.setdefault(name, {})  # pyright: ignore[reportAssignmentType]
    tree[last] = value
