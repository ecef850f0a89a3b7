"""What one rank of an SGLang engine, and one of a trainer, takes at its peak. Pure; sizes in GiB.

Each process is made of named parts, each with the source of its formula. An engine's rank has

    static     mem_fraction_static of what was free when the engine started (after its CUDA context): the weights, and a
               KV cache that takes all the rest
    beside it  activations of a prefill, CUDA graphs, the workspace of attention, the table of requests, sampled logits

Where the fraction is not given, SGLang chooses it: all but 512 MiB, 1.5 MiB a token of a prefill chunk, 2 MiB a
sequence of the largest CUDA graph and 1/8 GiB a rank; and on GPUs above 60 GiB it leaves 10 GiB at least.

A trainer's rank has

    static      weights, gradients, optimizer: bytes a parameter by precision (ZeRO, section 3), cut by the parallelism
    transient   the larger of: all stored activations and the logits, at the loss; the optimizer's copies, at the step

One layer of a decoder with RMSNorm and SwiGLU stores, a token, in bf16 (each tensor that autograd keeps for backward,
counted as in Korthikanti et al., section 4; attention is fused, so that no scores are stored):

    12 h    two norms: the input in fp32, and what is normalised
     4 h    the inputs of q, k, v and of gate, up
     4 q + 4 kv    queries, keys, values and the output of attention
     8 i    gate, its activation, up, their product
     6 q + 6 kv    where each head's query and key is normalised (Qwen3)

With gradient checkpointing only each layer's input (2 h) stays, and one layer at a time is computed again. Then nothing
but the logits leaves large blocks behind: the gradients that accumulate are cut out of those, and the logits of the
next micro-batch need new ones.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from refitd_plan.allocation import Component, Parallel
from refitd_plan.job import AttentionBackend, JobSettings, Loss, Optimizer, Precision
from refitd_plan.machine import GIB
from refitd_plan.model import Model, lora_parameters

ZERO = "Rajbhandari et al. 2020, ZeRO (arXiv 1910.02054), section 3"
RECOMPUTE = "Korthikanti et al. 2022 (arXiv 2205.05198), section 4, counted again for SwiGLU and RMSNorm"
EIGHT_BIT = "Dettmers et al. 2022, 8-bit Optimizers (arXiv 2110.02861)"
LORA = "Hu et al. 2021, LoRA (arXiv 2106.09685), section 4.1"
REFERENCE = (
    "TRL 1, grpo_trainer.py: a second model in the trainer's dtype, cut as the trainer is; none with adapters, "
    "which are switched off in its place"
)
GMLAKE = "Guo et al. 2024, GMLake (arXiv 2401.08156): 15 % of PyTorch's memory is lost in fragments on average"
SGLANG_POOL = "SGLang 0.5, kv_cache_configurator.py, _profile_available_bytes"
SGLANG_MEMORY = "SGLang 0.5, arg_groups/memory_hook.py, handle_gpu_memory_settings"
SGLANG_REQUESTS = "SGLang 0.5, mem_cache/memory_pool.py, ReqToTokenPool"
SGLANG_LORA = "SGLang 0.5, lora/mem_pool.py, LoRAMemoryPool: max_loras_per_batch (8) adapters of the largest rank"
CONFIG = "the model's config.json"
CONTEXT = "calibrated: what CUDA, PyTorch's kernels and cuBLAS take before the first tensor"
STAGING = "refitd_client: two chunks of 64 MiB with a shadow in host memory"
CONTEXT_GIB = 0.5
"""A process's CUDA context. It differs by driver and GPU (0.4 to 0.6 were seen in reports of RTX 4090 and H200)."""
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
FRAGMENTS = 0.15
_DOUBLE = 2
_MEGATRON_GRADIENT = 4  # bytes
LOGIT_BYTES: Mapping[Loss, int] = {
    Loss.FUSED: 4,  # the logits and their gradient, in bf16
    Loss.EAGER: 14,  # the logits in bf16; log-softmax, its gradient and the logits' gradient in fp32
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """One part of a process. `size` is in GiB."""

    name: str
    size: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """One process on one GPU. `title` says which; `gpu` counts over all nodes."""

    title: str
    role: str
    gpu: int
    parts: tuple[MemoryPart, ...]

    @property
    def total(self) -> float:
        """The peak, in GiB."""
        return sum(part.size for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """One rank's parts; how many tokens its KV cache holds, and the fraction that led there.

    `kv_tokens` below 0: the weights alone are more than the static share.
    """

    parts: tuple[MemoryPart, ...]
    kv_tokens: int
    fraction: float


def engine_memory(model: Model, parallel: Parallel, job: JobSettings, *, capacity: float, free: float) -> EngineMemory:
    """An engine rank's memory.

    Args:
        model: what it serves.
        parallel: the engine's parallelism.
        job: the settings.
        capacity: the GPU's memory, in GiB.
        free: what of it is free when the engine starts, in GiB.
    """
    fraction = job.mem_fraction_static or default_fraction(capacity, parallel, job)
    # In bf16; the norms and routers that each rank has whole are counted as cut.
    weights = WEIGHT_BYTES * model.parameters / (parallel.t * parallel.p) / GIB
    cell = model.kv_bytes(parallel.t, parallel.p, job.kv_cache_bytes)
    adapters = 0.0  # SGLang makes the buffers for adapters before it looks what is left for the KV cache
    if job.lora_rank is not None:
        adapters = _ADAPTERS * WEIGHT_BYTES * lora_parameters(model, job.lora_rank) / (parallel.t * parallel.p) / GIB
    pool = fraction * (free - CONTEXT_GIB) - weights - adapters
    tokens = int(pool * GIB // cell)
    if job.max_total_tokens is not None and tokens > job.max_total_tokens:
        tokens = job.max_total_tokens
        pool = tokens * cell / GIB
    parts = (
        MemoryPart(name="CUDA context", size=CONTEXT_GIB, source=CONTEXT),
        MemoryPart(name="weights", size=weights, source=CONFIG),
        MemoryPart(name="adapters", size=adapters, source=SGLANG_LORA),
        MemoryPart(name="KV cache", size=max(0.0, pool), source=SGLANG_POOL),
        *forward_parts(model, parallel, job, capacity, tokens),
    )
    return EngineMemory(parts=tuple(part for part in parts if part.size > 0), kv_tokens=tokens, fraction=fraction)


def default_fraction(capacity: float, parallel: Parallel, job: JobSettings) -> float:
    """The fraction that SGLang chooses by itself.

    Args:
        capacity: the GPU's memory, in GiB.
        parallel: the engine's parallelism.
        job: the settings.
    """
    chunk, graphs = _sizes(capacity, parallel.t)
    reserved = 512 + 1.5 * max(chunk, 2048) + parallel.t * parallel.p / 8 * 1024
    if job.cuda_graphs:
        reserved += 2 * min(graphs, job.running_requests or graphs)
    if capacity > _LARGE_GPU:
        reserved = max(reserved, _LARGE_RESERVE)
    return round(1 - reserved / 1024 / capacity, 3)


def forward_parts(
    model: Model, parallel: Parallel, job: JobSettings, capacity: float, tokens: int
) -> Iterator[MemoryPart]:
    """What an engine takes beside weights and KV cache: a forward pass, CUDA graphs, the table of requests.

    Args:
        model: what it serves.
        parallel: the engine's parallelism.
        job: the settings.
        capacity: the GPU's memory, in GiB.
        tokens: what the KV cache holds.
    """
    chunk, graphs = _sizes(capacity, parallel.t)
    context = job.context_length or model.context or _DEFAULT_CONTEXT
    running = requests_at_once(job, parallel)
    prefilled = min(chunk, running * job.prompt_tokens)
    # Bytes a token at the widest point of a layer: the residual, its norm and output, gate, up and their product.
    experts = model.experts
    inner = model.inner if experts is None else max(experts.active * experts.size + experts.shared_size, model.q_size)
    widest = 2 * (3 * model.hidden + 3 * inner / parallel.t)
    yield MemoryPart(name="activations", size=prefilled * widest / GIB, source=SGLANG_MEMORY)
    if job.cuda_graphs:
        yield MemoryPart(name="CUDA graphs", size=_GRAPH_BYTES * min(graphs, running) / GIB, source=SGLANG_MEMORY)
    if job.attention_backend is AttentionBackend.FLASHINFER:
        yield MemoryPart(name="attention workspace", size=_FLASHINFER_WORKSPACE / GIB, source=SGLANG_MEMORY)
    rows = job.running_requests or max(min(int(tokens / context * 512), _MOST_REQUESTS), _LEAST_REQUESTS)
    yield MemoryPart(
        name="request table", size=4 * min(rows, max(1, tokens // 2)) * context / GIB, source=SGLANG_REQUESTS
    )
    # Sampling has the logits of every sequence in bf16 and, while it makes probabilities of them, twice in fp32.
    yield MemoryPart(name="logits", size=10 * running * model.vocabulary / GIB, source=SGLANG_MEMORY)


def requests_at_once(job: JobSettings, parallel: Parallel) -> int:
    """Sequences that one engine generates at a time: its share of the rollouts, if it may run so many."""
    share = -(-job.requests // parallel.d)
    return min(share, job.running_requests or share)


def _sizes(capacity: float, tp: int) -> tuple[int, int]:
    _, chunk, few, many = next(row for row in _SIZES if capacity < row[0])
    return chunk, many if tp >= _MANY_RANKS else few


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldParameters:
    """Parameters of one rank: those whose weights it keeps, whose gradients, and whose optimizer state."""

    weights: float
    gradients: float
    state: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Bytes a parameter: of the weights, the gradients, a master copy, and each of two moments."""

    weights: int
    gradients: int
    master: int
    moment: int


WIDTHS: Mapping[Precision, Widths] = {
    Precision.BF16: Widths(weights=2, gradients=2, master=0, moment=2),
    Precision.MIXED: Widths(weights=2, gradients=2, master=4, moment=4),
    Precision.FP32: Widths(weights=4, gradients=4, master=0, moment=4),
}


def trainer_parts(model: Model, trainer: Component, job: JobSettings) -> tuple[MemoryPart, ...]:
    """The parts of a trainer rank's memory at its peak.

    Args:
        model: what it trains.
        trainer: its backend and parallelism.
        job: the settings.
    """
    return tuple(part for part in (*_static(model, trainer, job), *_transient(model, trainer, job)) if part.size > 0)


def _static(model: Model, trainer: Component, job: JobSettings) -> Iterator[MemoryPart]:
    widths, parallel, held = WIDTHS[job.precision], trainer.parallel, held_by(model, trainer, job)
    source = LORA if job.lora_rank else ZERO
    moments = {Optimizer.ADAMW: 2 * widths.moment, Optimizer.ADAMW_8BIT: 2, Optimizer.SGD: 0}[job.optimizer]
    state_bytes = widths.master + moments
    yield MemoryPart(name="CUDA context", size=CONTEXT_GIB, source=CONTEXT)
    yield MemoryPart(name="weights", size=widths.weights * held.weights / GIB, source=ZERO)
    if not _is_megatron(trainer) and parallel.d * parallel.c > 1:
        layer = (model.dense_parameters + model.expert_parameters) / model.layers
        gathered = _DOUBLE * layer / parallel.t * min(widths.weights, 2)
        yield MemoryPart(name="gathered layers", size=gathered / GIB, source=ZERO)
    if job.reference_model and job.lora_rank is None:
        yield MemoryPart(name="reference model", size=widths.weights * held.weights / GIB, source=REFERENCE)
    yield MemoryPart(name="gradients", size=_gradients(trainer, job, held) / GIB, source=source)
    yield MemoryPart(
        name="optimizer",
        size=state_bytes * held.state / GIB,
        source=EIGHT_BIT if job.optimizer is Optimizer.ADAMW_8BIT else source,
    )


def held_by(model: Model, trainer: Component, job: JobSettings) -> HeldParameters:
    """What one rank holds: FSDP cuts all three over data and context parallel ranks, Megatron's distributed optimizer
    (ZeRO's first stage) its own state alone, that of experts over the ranks that have the same experts.

    Args:
        model: what is trained.
        trainer: its backend and parallelism.
        job: the settings.
    """
    parallel = trainer.parallel
    sharded = parallel.d * parallel.c
    body, experts = local_parameters(model, trainer)
    adapters = 0.0 if job.lora_rank is None else lora_parameters(model, job.lora_rank) / (parallel.t * parallel.p)
    if not _is_megatron(trainer):
        weights = (body + experts + adapters) / sharded
        trained = adapters / sharded if job.lora_rank else weights
        return HeldParameters(weights=weights, gradients=trained, state=trained)
    if job.lora_rank:
        return HeldParameters(weights=body + experts + adapters, gradients=adapters, state=adapters / sharded)
    alike = parallel.world / (parallel.e * parallel.et * parallel.p)
    return HeldParameters(weights=body + experts, gradients=body + experts, state=body / sharded + experts / alike)


def _is_megatron(trainer: Component) -> bool:
    return trainer.backend == "megatron"


def _gradients(trainer: Component, job: JobSettings, held: HeldParameters) -> float:
    """Bytes of one rank's gradients. Megatron adds them up in fp32 (grad_reduce_in_fp32, as AReaL sets it)."""
    width = WIDTHS[job.precision].gradients
    return (_MEGATRON_GRADIENT if _is_megatron(trainer) else width) * held.gradients


def _transient(model: Model, trainer: Component, job: JobSettings) -> Iterator[MemoryPart]:
    parallel, held = trainer.parallel, held_by(model, trainer, job)
    tokens = job.trained_tokens(parallel.d) / parallel.c
    activations, logits = _stored(model, parallel, job, tokens)
    yield MemoryPart(name="activations", size=activations / GIB, source=RECOMPUTE)
    yield MemoryPart(name="logits", size=logits / GIB, source=RECOMPUTE)
    if not job.expandable_segments:
        adds_up = job.gradient_checkpointing and job.accumulates(parallel.d)
        cut = _gradients(trainer, job, held) if adds_up else 0.0
        fragments = max(min(cut, logits), FRAGMENTS * (activations + logits))
        yield MemoryPart(name="fragments", size=fragments / GIB, source=GMLAKE)
    # AdamW's default implementation makes one more copy of a moment at the step, when activations are gone.
    step = 0 if job.optimizer is Optimizer.SGD else WIDTHS[job.precision].moment * held.state
    yield MemoryPart(name="optimizer step", size=max(0.0, step - activations - logits) / GIB, source=ZERO)


def _stored(model: Model, parallel: Parallel, job: JobSettings, tokens: float) -> tuple[float, float]:
    """Bytes of activations and of logits when both together are the most."""
    width = 2 if job.precision is Precision.FP32 else 1
    layers = model.layers / parallel.p
    # The first stage of a pipeline has as many micro-batches under way as there are stages.
    under_way = parallel.p
    logits = LOGIT_BYTES[job.loss] * model.vocabulary / parallel.t * tokens * width
    head = 8 * model.hidden * tokens * width
    layer = layer_bytes(model, parallel.t) * tokens * width
    if not job.gradient_checkpointing:
        return layers * under_way * layer + head, logits
    inputs = 2 * model.hidden * tokens * width * layers * under_way
    return (inputs + head, logits) if logits >= layer else (inputs + layer, 0.0)


def layer_bytes(model: Model, tensor_parallel: int = 1) -> float:
    """What a token leaves behind in one layer, in bytes, for bf16. Where experts differ from plain layers, the mean."""
    whole = 16 * model.hidden
    cut = 2 * (model.q_size + model.out_size)
    cut += 2 * (model.q_size + model.out_size) if model.latent is not None else 4 * model.kv_size
    cut += 6 * (model.q_size + model.kv_size) if model.norms_heads else 0
    cut += 8 * model.inner * model.dense_layers / model.layers
    if model.experts is not None:
        experts = model.experts
        routed = experts.active * (8 * experts.size + 4 * model.hidden) + 8 * experts.shared_size
        cut += routed * (model.layers - model.dense_layers) / model.layers
    return whole + cut / tensor_parallel


def local_parameters(model: Model, trainer: Component) -> tuple[float, float]:
    """Parameters of one rank before data parallelism cuts them, in the heaviest stage of a pipeline: of experts, and
    all others. Megatron cuts experts by their own tensor parallelism (1 unless said), never by attention's.
    """
    parallel = trainer.parallel
    body = model.dense_parameters / (parallel.t * parallel.p)
    body += model.embedding_parameters / parallel.t / (1 if model.tied or parallel.p == 1 else 2)
    cut = parallel.e * parallel.et
    experts = model.expert_parameters / ((cut if _is_megatron(trainer) else max(parallel.t, cut)) * parallel.p)
    return body, experts
