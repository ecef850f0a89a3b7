"""What one rank of a trainer takes at its peak. Pure; sizes in GiB.

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
from refitd_plan.job import Job
from refitd_plan.machine import GIB
from refitd_plan.model import Model, lora_parameters
from refitd_plan.parts import CONTEXT, CONTEXT_GIB, EIGHT_BIT, GMLAKE, LORA, RECOMPUTE, REFERENCE, ZERO, Part
from refitd_plan.words import Loss, Optimizer, Precision

FRAGMENTS = 0.15
_DOUBLE = 2
_MEGATRON_GRADIENT = 4  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
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
LOGIT_BYTES: Mapping[Loss, int] = {
    Loss.FUSED: 4,  # the logits and their gradient, in bf16
    Loss.EAGER: 14,  # the logits in bf16; log-softmax, its gradient and the logits' gradient in fp32
}


def trainer_parts(model: Model, trainer: Component, job: Job) -> tuple[Part, ...]:
    """The parts of one rank's memory at its peak."""
    return tuple(part for part in (*_static(model, trainer, job), *_transient(model, trainer, job)) if part.size > 0)


def _static(model: Model, trainer: Component, job: Job) -> Iterator[Part]:
    widths, parallel, held = WIDTHS[job.precision], trainer.parallel, held_by(model, trainer, job)
    source = LORA if job.lora_rank else ZERO
    yield Part(name="CUDA context", size=CONTEXT_GIB, source=CONTEXT)
    yield Part(name="weights", size=widths.weights * held.weights / GIB, source=ZERO)
    if not _is_megatron(trainer) and parallel.d * parallel.c > 1:
        gathered = _DOUBLE * _layer_parameters(model) / parallel.t * min(widths.weights, 2)
        yield Part(name="gathered layers", size=gathered / GIB, source=ZERO)
    if job.reference_model and job.lora_rank is None:
        yield Part(name="reference model", size=widths.weights * held.weights / GIB, source=REFERENCE)
    yield Part(name="gradients", size=_gradients(trainer, job, held) / GIB, source=source)
    yield Part(
        name="optimizer",
        size=_state_bytes(job, widths) * held.state / GIB,
        source=EIGHT_BIT if job.optimizer is Optimizer.ADAMW_8BIT else source,
    )


def held_by(model: Model, trainer: Component, job: Job) -> Held:
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
        return Held(weights=weights, gradients=trained, state=trained)
    if job.lora_rank:
        return Held(weights=body + experts + adapters, gradients=adapters, state=adapters / sharded)
    alike = parallel.world / (parallel.e * parallel.et * parallel.p)
    return Held(weights=body + experts, gradients=body + experts, state=body / sharded + experts / alike)


def _is_megatron(trainer: Component) -> bool:
    return trainer.backend == "megatron"


def _gradients(trainer: Component, job: Job, held: Held) -> float:
    """Bytes of one rank's gradients. Megatron adds them up in fp32 (grad_reduce_in_fp32, as AReaL sets it)."""
    width = WIDTHS[job.precision].gradients
    return (_MEGATRON_GRADIENT if _is_megatron(trainer) else width) * held.gradients


def _transient(model: Model, trainer: Component, job: Job) -> Iterator[Part]:
    parallel, held = trainer.parallel, held_by(model, trainer, job)
    tokens = job.trained_tokens(parallel.d) / parallel.c
    activations, logits = _stored(model, parallel, job, tokens)
    yield Part(name="activations", size=activations / GIB, source=RECOMPUTE)
    yield Part(name="logits", size=logits / GIB, source=RECOMPUTE)
    if not job.expandable_segments:
        adds_up = job.gradient_checkpointing and job.accumulates(parallel.d)
        cut = _gradients(trainer, job, held) if adds_up else 0.0
        fragments = max(min(cut, logits), FRAGMENTS * (activations + logits))
        yield Part(name="fragments", size=fragments / GIB, source=GMLAKE)
    # AdamW's default implementation makes one more copy of a moment at the step, when activations are gone.
    step = 0 if job.optimizer is Optimizer.SGD else WIDTHS[job.precision].moment * held.state
    yield Part(name="optimizer step", size=max(0.0, step - activations - logits) / GIB, source=ZERO)


def _stored(model: Model, parallel: Parallel, job: Job, tokens: float) -> tuple[float, float]:
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


def _layer_parameters(model: Model) -> float:
    return (model.dense_parameters + model.expert_parameters) / model.layers


def _state_bytes(job: Job, widths: Widths) -> int:
    match job.optimizer:
        case Optimizer.ADAMW:
            return widths.master + 2 * widths.moment
        case Optimizer.ADAMW_8BIT:
            return widths.master + 2
        case Optimizer.SGD:
            return widths.master
