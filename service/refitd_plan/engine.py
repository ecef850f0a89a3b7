"""What one rank of an SGLang engine takes. Pure; sizes in GiB.

    static     mem_fraction_static of what was free when the engine started (after its CUDA context): the weights, and a
               KV cache that takes all the rest
    beside it  activations of a prefill, CUDA graphs, the workspace of attention, the table of requests, sampled logits

Where the fraction is not given, SGLang chooses it: all but 512 MiB, 1.5 MiB a token of a prefill chunk, 2 MiB a
sequence of the largest CUDA graph and 1/8 GiB a rank; and on GPUs above 60 GiB it leaves 10 GiB at least.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from refitd_plan.allocation import Parallel
from refitd_plan.job import Job
from refitd_plan.machine import GIB
from refitd_plan.model import Model, lora_parameters
from refitd_plan.parts import (
    CONFIG,
    CONTEXT,
    CONTEXT_GIB,
    SGLANG_LORA,
    SGLANG_MEMORY,
    SGLANG_POOL,
    SGLANG_REQUESTS,
    Part,
)
from refitd_plan.words import AttentionBackend

WEIGHT_BYTES = 2
_ADAPTERS = 8  # --max-loras-per-batch
_MIB = 2**20
_FLASHINFER_WORKSPACE = 384 * _MIB  # SGLANG_FLASHINFER_WORKSPACE_SIZE
_GRAPH_BYTES = 2 * _MIB  # a sequence of the largest captured batch
_LEAST_REQUESTS, _MOST_REQUESTS = 2048, 4096  # rows of the table of requests that SGLang makes unasked
_DEFAULT_CONTEXT = 32_768
_MANY_RANKS = 4
# Below so many GiB of GPU: tokens of a prefill chunk, sequences of the largest CUDA graph (with tp >= 4).
_SIZES: tuple[tuple[float, int, int, int], ...] = (
    (20, 2048, 8, 8),
    (35, 4096, 48, 160),
    (60, 4096, 32, 160),
    (160, 8192, 256, 512),
    (float("inf"), 16_384, 512, 512),
)
_LARGE_GPU, _LARGE_RESERVE = 60, 10 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """One rank's parts; how many tokens its KV cache holds, and the fraction that led there.

    `kv_tokens` below 0: the weights alone are more than the static share.
    """

    parts: tuple[Part, ...]
    kv_tokens: int
    fraction: float


def engine_memory(model: Model, parallel: Parallel, job: Job, *, capacity: float, free: float) -> EngineMemory:
    """An engine rank's memory on a GPU of `capacity` GiB, `free` of which are free when it starts."""
    fraction = job.mem_fraction_static or default_fraction(capacity, parallel, job)
    weights = engine_weights(model, parallel) / GIB
    cell = model.kv_bytes(parallel.t, parallel.p, job.kv_cache_bytes)
    adapters = _adapter_pool(model, parallel, job) / GIB
    pool = fraction * (free - CONTEXT_GIB) - weights - adapters
    tokens = int(pool * GIB // cell)
    if job.max_total_tokens is not None and tokens > job.max_total_tokens:
        tokens = job.max_total_tokens
        pool = tokens * cell / GIB
    parts = (
        Part(name="CUDA context", size=CONTEXT_GIB, source=CONTEXT),
        Part(name="weights", size=weights, source=CONFIG),
        Part(name="adapters", size=adapters, source=SGLANG_LORA),
        Part(name="KV cache", size=max(0.0, pool), source=SGLANG_POOL),
        *_beside(model, parallel, job, capacity, tokens),
    )
    return EngineMemory(parts=tuple(part for part in parts if part.size > 0), kv_tokens=tokens, fraction=fraction)


def default_fraction(capacity: float, parallel: Parallel, job: Job) -> float:
    """The fraction that SGLang chooses by itself."""
    chunk, graphs = _sizes(capacity, parallel.t)
    reserved = 512 + 1.5 * max(chunk, 2048) + parallel.t * parallel.p / 8 * 1024
    if job.cuda_graphs:
        reserved += 2 * min(graphs, job.running_requests or graphs)
    if capacity > _LARGE_GPU:
        reserved = max(reserved, _LARGE_RESERVE)
    return round(1 - reserved / 1024 / capacity, 3)


def engine_weights(model: Model, parallel: Parallel) -> float:
    """Bytes of one rank's weights in bf16, the norms and routers that each rank has whole counted as cut."""
    return WEIGHT_BYTES * model.parameters / (parallel.t * parallel.p)


def _adapter_pool(model: Model, parallel: Parallel, job: Job) -> float:
    """Bytes of the buffers for adapters, which SGLang makes before it looks what is left for the KV cache."""
    if job.lora_rank is None:
        return 0.0
    return _ADAPTERS * WEIGHT_BYTES * lora_parameters(model, job.lora_rank) / (parallel.t * parallel.p)


def _beside(model: Model, parallel: Parallel, job: Job, capacity: float, tokens: int) -> Iterator[Part]:
    chunk, graphs = _sizes(capacity, parallel.t)
    context = job.context_length or model.context or _DEFAULT_CONTEXT
    running = requests_at_once(job, parallel)
    prefilled = min(chunk, running * job.prompt_tokens)
    yield Part(name="activations", size=prefilled * _prefill_bytes(model, parallel.t) / GIB, source=SGLANG_MEMORY)
    if job.cuda_graphs:
        yield Part(name="CUDA graphs", size=_GRAPH_BYTES * min(graphs, running) / GIB, source=SGLANG_MEMORY)
    if job.attention_backend is AttentionBackend.FLASHINFER:
        yield Part(name="attention workspace", size=_FLASHINFER_WORKSPACE / GIB, source=SGLANG_MEMORY)
    rows = job.running_requests or max(min(int(tokens / context * 512), _MOST_REQUESTS), _LEAST_REQUESTS)
    yield Part(name="request table", size=4 * min(rows, max(1, tokens // 2)) * context / GIB, source=SGLANG_REQUESTS)
    # Sampling has the logits of every sequence in bf16 and, while it makes probabilities of them, twice in fp32.
    yield Part(name="logits", size=10 * running * model.vocabulary / GIB, source=SGLANG_MEMORY)


def requests_at_once(job: Job, parallel: Parallel) -> int:
    """Sequences that one engine generates at a time: its share of the rollouts, if it may run so many."""
    share = -(-job.requests // parallel.d)
    return min(share, job.running_requests or share)


def _prefill_bytes(model: Model, tp: int) -> float:
    """Bytes a token at the widest point of a layer: the residual, its norm and output, gate, up and their product."""
    experts = model.experts
    inner = model.inner if experts is None else max(experts.active * experts.size + experts.shared_size, model.q_size)
    return 2 * (3 * model.hidden + 3 * inner / tp)


def _sizes(capacity: float, tp: int) -> tuple[int, int]:
    _, chunk, few, many = next(row for row in _SIZES if capacity < row[0])
    return chunk, many if tp >= _MANY_RANKS else few
