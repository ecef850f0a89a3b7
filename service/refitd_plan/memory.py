"""The memory of every process at its peak, and whether all of it fits. Pure; sizes in GiB.

Engines start before trainers: an engine takes its share of what it finds free, and a trainer takes what is left.

An SGLang rank has (SGLang 0.5: kv_cache_configurator.py, arg_groups/memory_hook.py, mem_cache/memory_pool.py)

    static     mem_fraction_static of what was free when the engine started (after its CUDA context): the weights, and a
               KV cache that takes all the rest
    beside it  activations of a prefill, CUDA graphs, the workspace of attention, the table of requests, sampled logits

Where the fraction is not given, SGLang chooses it: all but 512 MiB, 1.5 MiB a token of a prefill chunk, 2 MiB a
sequence of the largest CUDA graph and 1/8 GiB a rank; and on GPUs above 60 GiB it leaves 10 GiB at least.

A vLLM rank takes `gpu_memory_utilization` of all of the GPU's memory, not of what is free. Weights, the largest forward
pass, CUDA graphs and the process's own context come out of it, and the KV cache takes the rest (vLLM 0.32,
v1/worker/utils.py, request_memory). The forward pass is counted as SGLang's is.

A trainer's rank has

    static      weights, gradients, optimizer: bytes a parameter by precision (ZeRO, arXiv 1910.02054, section 3), cut
                by the parallelism
    transient   the larger of: all stored activations and the logits, at the loss; the optimizer's copies, at the step

One layer of a decoder with RMSNorm and SwiGLU stores, a token, in bf16 (each tensor that autograd keeps for backward,
counted as in Korthikanti et al., arXiv 2205.05198, section 4; attention is fused, so that no scores are stored):

    12 h    two norms: the input in fp32, and what is normalised
     4 h    the inputs of q, k, v and of gate, up
     4 q + 4 kv    queries, keys, values and the output of attention
     8 i    gate, its activation, up, their product
     6 q + 6 kv    where each head's query and key is normalised (Qwen3)

With gradient checkpointing only each layer's input (2 h) stays, and one layer at a time is computed again. Then nothing
but the logits leaves large blocks behind: the gradients that accumulate are cut out of those, and the logits of the
next micro-batch need new ones. Else 15 % of PyTorch's memory is lost in fragments (GMLake, arXiv 2401.08156).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from refitd_client.ways import Transport
from refitd_plan.allocation import VLLM, Component, Parallel, Role
from refitd_plan.job import JobSettings, Loss, Optimizer, Precision
from refitd_plan.machine import GIB, Machine, Placement, Rank
from refitd_plan.model import Model, lora_parameters
from refitd_plan.plan import PlannedProcess

GPU_HEADROOM = 0.05
"""The share of a GPU that stays free: a prediction can be wrong, and a GPU that is full fails at the next token."""
WEIGHT_BYTES = 2
_CONTEXT_GIB = 0.5  # a process's CUDA context: 0.4 to 0.6 were seen in reports of RTX 4090 and H200
_ADAPTERS = 8  # --max-loras-per-batch
_MIB = 2**20
_FLASHINFER_WORKSPACE = 384 * _MIB  # SGLANG_FLASHINFER_WORKSPACE_SIZE
_GRAPH_BYTES = 2 * _MIB  # a sequence of the largest captured batch
_LEAST_REQUESTS, _MOST_REQUESTS = 2048, 4096  # rows of the table of requests that SGLang makes unasked
_DEFAULT_CONTEXT = 32_768
_DEFAULT_UTILIZATION = 0.92  # vLLM's
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
_FRAGMENTS = 0.15
_GATHERED_LAYERS = 2
_MEGATRON_GRADIENT = 4  # bytes
_LOGIT_BYTES: Mapping[Loss, int] = {
    Loss.FUSED: 4,  # the logits and their gradient, in bf16
    Loss.EAGER: 14,  # the logits in bf16; log-softmax, its gradient and the logits' gradient in fp32
}
_STAGING_GIB = 2 * 2**26 / GIB  # two chunks of 64 MiB, by which a publisher looks for changes
# refitd's own processes beside a rank, as measured on an H200 (docs/measurements.md): a CUDA context, and NCCL's
# memory.
_BESIDE: Mapping[tuple[Transport, str], float] = {
    ("nccl", "receiver"): 1.5,
    ("nccl", "sender"): 2.5,
    ("gloo", "receiver"): 0.5,
    ("gloo", "sender"): 0.5,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """One rank's parts; how many tokens its KV cache holds, and the fraction that led there.

    `kv_tokens` below 0: the weights alone are more than the static share.
    """

    parts: Mapping[str, float]
    kv_tokens: int
    fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """The processes, and why they do not fit: nothing where they do. `kv_tokens` is of the smallest KV cache."""

    processes: tuple[PlannedProcess, ...]
    faults: tuple[str, ...]
    kv_tokens: int
    kv_wanted: int
    fraction: float

    @property
    def fits(self) -> bool:
        return not self.faults

    @property
    def peak(self) -> float:
        return sum(process.total for process in self.processes)


def memory_of(
    model: Model, placement: Placement, machine: Machine, job: JobSettings, transport: Transport
) -> MemoryEstimate:
    """Every process's memory.

    Args:
        transport: how weights go. A publisher that looks for changes takes two chunks, and a broadcast has a receiver
            beside each engine rank and a sender.
    """
    taken: dict[int, float] = {}
    engines: list[tuple[PlannedProcess, EngineMemory]] = []
    for rank in placement.of(Role.GENERATION):
        capacity = machine.memory(rank.gpu)
        parallel = rank.component.parallel
        if rank.component.backend == VLLM:
            found = vllm_memory(model, parallel, job, capacity=capacity)
        else:
            free = capacity - taken.get(rank.gpu, 0.0)
            found = sglang_memory(model, parallel, job, capacity=capacity, free=free)
        process = _process(rank, {**found.parts, **_beside(transport, "receiver")})
        taken[rank.gpu] = taken.get(rank.gpu, 0.0) + process.total
        engines.append((process, found))
    trainers: list[PlannedProcess] = []
    for rank in placement.of(Role.TRAINING):
        parts = trainer_parts(model, rank.component, job)
        if rank.index == 0:
            parts |= _beside(transport, "sender")
        if transport == "delta":
            parts["publish staging"] = _STAGING_GIB
        trainers.append(_process(rank, parts))
    processes = (*(process for process, _ in engines), *trainers)
    parallel = placement.of(Role.GENERATION)[0].component.parallel
    return MemoryEstimate(
        processes=processes,
        faults=(*_faults_of_engines(engines, job), *_faults_of_gpus(processes, machine)),
        kv_tokens=min(found.kv_tokens for _, found in engines),
        kv_wanted=requests_at_once(job, parallel) * job.sequence_tokens,
        fraction=engines[0][1].fraction,
    )


def _beside(transport: Transport, name: str) -> dict[str, float]:
    """A process of refitd's beside a rank. A receiver's copy of the model is in host memory where there is no room."""
    size = _BESIDE.get((transport, name), 0.0)
    return {name: size} if size else {}


def _process(rank: Rank, parts: Mapping[str, float]) -> PlannedProcess:
    parts = _there(parts)
    return PlannedProcess(
        process=f"{rank.component.title} rank {rank.index}",
        role=rank.component.role,
        gpu=rank.gpu,
        total=round(sum(parts.values()), 2),
        parts={name: round(size, 3) for name, size in parts.items()},
    )


def _there(parts: Mapping[str, float]) -> dict[str, float]:
    return {name: size for name, size in parts.items() if size > 0}


def _faults_of_engines(engines: list[tuple[PlannedProcess, EngineMemory]], job: JobSettings) -> Iterable[str]:
    process, found = min(engines, key=lambda pair: pair[1].kv_tokens)
    if found.kv_tokens < job.sequence_tokens:
        room = f"for {max(0, found.kv_tokens)} tokens" if found.kv_tokens > 0 else "for nothing beside the weights"
        yield (
            f"{process.process} on GPU {process.gpu}: mem_fraction_static {found.fraction:g} leaves room {room}, "
            f"and one sequence has {job.sequence_tokens}"
        )


def _faults_of_gpus(processes: tuple[PlannedProcess, ...], machine: Machine) -> Iterable[str]:
    sums: dict[int, float] = {}
    for process in processes:
        sums[process.gpu] = sums.get(process.gpu, 0.0) + process.total
    over = {gpu: total for gpu, total in sums.items() if total > machine.memory(gpu) * (1 - GPU_HEADROOM)}
    if over:
        gpu, total = max(over.items(), key=lambda item: item[1])
        more = f" (and {len(over) - 1} more GPUs)" if len(over) > 1 else ""
        yield (
            f"GPU {gpu}{more} would hold {total:.1f} GiB, and has {machine.memory(gpu):.1f}, "
            f"of which {GPU_HEADROOM:.0%} is to stay free"
        )


def sglang_memory(model: Model, parallel: Parallel, job: JobSettings, *, capacity: float, free: float) -> EngineMemory:
    """An SGLang rank's memory.

    Args:
        free: what of it is free when the engine starts.
    """
    fraction = job.mem_fraction_static or default_fraction(capacity, parallel, job)
    adapters = 0.0  # SGLang makes the buffers for adapters before it looks what is left for the KV cache
    if job.lora_rank is not None:
        adapters = _ADAPTERS * WEIGHT_BYTES * lora_parameters(model, job.lora_rank) / (parallel.t * parallel.p) / GIB
    weights = _served_weights(model, parallel)
    pool = fraction * (free - _CONTEXT_GIB) - weights - adapters
    tokens = int(pool * GIB // model.kv_bytes(parallel.t, parallel.p))
    parts = {
        "CUDA context": _CONTEXT_GIB,
        "weights": weights,
        "adapters": adapters,
        "KV cache": pool,
        **forward_parts(model, parallel, job, capacity, tokens),
    }
    return EngineMemory(parts=_there(parts), kv_tokens=tokens, fraction=fraction)


def vllm_memory(model: Model, parallel: Parallel, job: JobSettings, *, capacity: float) -> EngineMemory:
    """A vLLM rank's memory. The arguments are those of `sglang_memory`."""
    share = job.mem_fraction_static or _DEFAULT_UTILIZATION
    weights, cell = _served_weights(model, parallel), model.kv_bytes(parallel.t, parallel.p)
    before = max(0.0, share * capacity - _CONTEXT_GIB - weights)
    passes = forward_parts(model, parallel, job, capacity, int(before * GIB // cell))
    fixed = {"CUDA context": _CONTEXT_GIB, "weights": weights, **passes}
    pool = share * capacity - sum(fixed.values())
    return EngineMemory(parts=_there({**fixed, "KV cache": pool}), kv_tokens=int(pool * GIB // cell), fraction=share)


def _served_weights(model: Model, parallel: Parallel) -> float:
    """A rank's weights in bf16. The norms and routers that each rank has whole are counted as cut."""
    return WEIGHT_BYTES * model.parameters / (parallel.t * parallel.p) / GIB


def default_fraction(capacity: float, parallel: Parallel, job: JobSettings) -> float:
    """The fraction that SGLang chooses by itself. The arguments are those of `sglang_memory`."""
    chunk, graphs = _sizes(capacity, parallel.t)
    reserved = 512 + 1.5 * max(chunk, 2048) + parallel.t * parallel.p / 8 * 1024
    reserved += 2 * min(graphs, job.running_requests or graphs)
    if capacity > _LARGE_GPU:
        reserved = max(reserved, _LARGE_RESERVE)
    return round(1 - reserved / 1024 / capacity, 3)


def forward_parts(
    model: Model, parallel: Parallel, job: JobSettings, capacity: float, tokens: int
) -> Mapping[str, float]:
    """What an engine takes beside weights and KV cache: a forward pass, CUDA graphs, the table of requests."""
    chunk, graphs = _sizes(capacity, parallel.t)
    context = job.context_length or model.context or _DEFAULT_CONTEXT
    running = requests_at_once(job, parallel)
    # Bytes a token at the widest point of a layer: the residual, its norm and output, gate, up and their product.
    experts = model.experts
    inner = model.inner if experts is None else max(experts.active * experts.size + experts.shared_size, model.q_size)
    widest = 2 * (3 * model.hidden + 3 * inner / parallel.t)
    rows = job.running_requests or max(min(int(tokens / context * 512), _MOST_REQUESTS), _LEAST_REQUESTS)
    sizes = {
        "activations": min(chunk, running * job.prompt_tokens) * widest,
        "CUDA graphs": _GRAPH_BYTES * min(graphs, running),
        "attention workspace": _FLASHINFER_WORKSPACE,
        "request table": 4 * min(rows, max(1, tokens // 2)) * context,
        # Sampling has the logits of every sequence in bf16 and, while it makes probabilities of them, twice in fp32.
        "logits": 10 * running * model.vocabulary,
    }
    return {name: size / GIB for name, size in sizes.items()}


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
class _Widths:
    """Bytes a parameter: of the weights, the gradients, a master copy, and each of two moments."""

    weights: int
    gradients: int
    master: int
    moment: int


_WIDTHS_BY_PRECISION: Mapping[Precision, _Widths] = {
    Precision.BF16: _Widths(weights=2, gradients=2, master=0, moment=2),
    Precision.MIXED: _Widths(weights=2, gradients=2, master=4, moment=4),
    Precision.FP32: _Widths(weights=4, gradients=4, master=0, moment=4),
}


def trainer_parts(model: Model, trainer: Component, job: JobSettings) -> dict[str, float]:
    return dict((*_static(model, trainer, job), *_transient(model, trainer, job)))


def _static(model: Model, trainer: Component, job: JobSettings) -> Iterator[tuple[str, float]]:
    widths, parallel, held = _WIDTHS_BY_PRECISION[job.precision], trainer.parallel, held_by(model, trainer, job)
    moments = {Optimizer.ADAMW: 2 * widths.moment, Optimizer.ADAMW_8BIT: 2, Optimizer.SGD: 0}[job.optimizer]
    weights = widths.weights * held.weights / GIB
    yield "CUDA context", _CONTEXT_GIB
    yield "weights", weights
    if not _is_megatron(trainer) and parallel.d * parallel.c > 1:
        layer = (model.dense_parameters + model.expert_parameters) / model.layers
        yield "gathered layers", _GATHERED_LAYERS * layer / parallel.t * min(widths.weights, 2) / GIB
    if job.reference_model and job.lora_rank is None:  # TRL switches adapters off in its place
        yield "reference model", weights
    yield "gradients", _gradients(trainer, job, held) / GIB
    yield "optimizer", (widths.master + moments) * held.state / GIB


def held_by(model: Model, trainer: Component, job: JobSettings) -> HeldParameters:
    """What one rank holds: FSDP cuts all three over data and context parallel ranks, Megatron's distributed optimizer
    (ZeRO's first stage) its own state alone, that of experts over the ranks that have the same experts.
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
    width = _WIDTHS_BY_PRECISION[job.precision].gradients
    return (_MEGATRON_GRADIENT if _is_megatron(trainer) else width) * held.gradients


def _transient(model: Model, trainer: Component, job: JobSettings) -> Iterator[tuple[str, float]]:
    parallel, held = trainer.parallel, held_by(model, trainer, job)
    tokens = job.trained_tokens(parallel.d) / parallel.c
    activations, logits = _stored(model, parallel, job, tokens)
    yield "activations", activations / GIB
    yield "logits", logits / GIB
    if not job.expandable_segments:
        adds_up = job.gradient_checkpointing and job.accumulates(parallel.d)
        cut = _gradients(trainer, job, held) if adds_up else 0.0
        yield "fragments", max(min(cut, logits), _FRAGMENTS * (activations + logits)) / GIB
    # AdamW's default implementation makes one more copy of a moment at the step, when activations are gone.
    step = 0 if job.optimizer is Optimizer.SGD else _WIDTHS_BY_PRECISION[job.precision].moment * held.state
    yield "optimizer step", (step - activations - logits) / GIB


def _stored(model: Model, parallel: Parallel, job: JobSettings, tokens: float) -> tuple[float, float]:
    """Bytes of activations and of logits when both together are the most."""
    width = 2 if job.precision is Precision.FP32 else 1
    layers = model.layers / parallel.p
    # The first stage of a pipeline has as many micro-batches under way as there are stages.
    under_way = parallel.p
    logits = _LOGIT_BYTES[job.loss] * model.vocabulary / parallel.t * tokens * width
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
