"""Whether a job fits its GPUs, and the smallest set of changes that makes it fit, with what each saves. Pure.

Sets are tried by size, and among sets of one size in the order of `KNOBS`, so that what costs least comes first, and
what changes the learning itself (how many prompts a step, how long the answers) last; those that leave the KV cache
room for all requests at once before those that make some of them wait. Those that starve it, so that most requests
wait, come after all others: one setting more is the smaller price. Within a set each knob is turned as far as it goes;
where that fits, each is turned back as far as the job still fits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from refitd_client.ways import Transport
from refitd_plan.job import JobSettings
from refitd_plan.machine import GIB, Machine, Placement
from refitd_plan.memory import GPU_HEADROOM, WEIGHT_BYTES, MemoryEstimate, memory_of
from refitd_plan.model import Model, lora_parameters
from refitd_plan.plan import PlannedChange, PlannedMemory
from refitd_plan.transport import host_fault, on_root, versions_on_root

Measure = Callable[[JobSettings], MemoryEstimate]
_LEAST_FRACTION, _MOST_FRACTION, _FRACTION_STEP = 0.1, 0.9, 0.05
_LEAST_ANSWER = 128
_LEAST_MICRO_BATCH = 1024
_ROOMS = (1.0, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One setting that can be changed. `levels` gives the values to try, the mildest first; none where it cannot."""

    setting: str
    levels: Callable[[JobSettings, MemoryEstimate], Sequence[object]]
    costs: str


def _halves(value: int, least: int) -> list[int]:
    levels: list[int] = []
    while value // 2 >= least:
        value //= 2
        levels.append(value)
    return levels


def _powers_below(value: int, least: int) -> list[int]:
    """Powers of two, which is what people write."""
    powers = [2**power for power in range(value.bit_length(), 0, -1)]
    return [power for power in powers if least <= power < value]


def _fractions(_: JobSettings, now: MemoryEstimate) -> list[float]:
    steps = range(round(_MOST_FRACTION / _FRACTION_STEP), 0, -1)
    values = [round(_FRACTION_STEP * step, 2) for step in steps if _FRACTION_STEP * step >= _LEAST_FRACTION]
    # Too little is the other fault of an engine: weights and cache that do not fit its share.
    more = [value for value in reversed(values) if value > now.fraction]
    return more if now.kv_tokens < 1 else [value for value in values if value < now.fraction]


KNOBS: tuple[Knob, ...] = (
    Knob(
        setting="gradient_checkpointing",
        levels=lambda job, _: [] if job.gradient_checkpointing else [True],
        costs="one more forward pass for each backward pass",
    ),
    Knob(setting="mem_fraction_static", levels=_fractions, costs="a smaller KV cache"),
    Knob(
        setting="micro_batch_tokens",
        levels=lambda job, _: _powers_below(job.micro_batch_tokens, max(_LEAST_MICRO_BATCH, job.sequence_tokens)),
        costs="more, smaller micro-batches",
    ),
    Knob(
        setting="concurrent_rollouts",
        levels=lambda job, _: _halves(job.concurrent_rollouts, 1),
        costs="fewer sequences at a time",
    ),
    Knob(
        setting="expandable_segments",
        levels=lambda job, _: [] if job.expandable_segments else [True],
        costs="no hand-over by CUDA IPC",
    ),
    Knob(
        setting="batch_size",
        levels=lambda job, _: _halves(job.batch_size, 1),
        costs="fewer prompts a step: it learns otherwise",
    ),
    Knob(
        setting="max_new_tokens",
        levels=lambda job, _: _halves(job.max_new_tokens, _LEAST_ANSWER),
        costs="shorter answers: it learns otherwise",
    ),
)


def changes(job: JobSettings, measure: Measure, *, handover: bool) -> tuple[PlannedChange, ...] | None:
    """The changes that make the job fit, in order; none where it fits, None where no set does.

    Args:
        handover: tensors are handed over by CUDA IPC, which expandable segments would rule out.
    """
    now = measure(job)
    if now.fits:
        return ()
    knobs = [knob for knob in KNOBS if not (handover and knob.setting == "expandable_segments")]
    movable = [(knob, levels) for knob in knobs if (levels := knob.levels(job, now))]
    sets = [list(combinations(movable, size)) for size in range(1, len(movable) + 1)]
    by_size = [(turned, room) for of_size in sets for room in _ROOMS for turned in of_size]
    for turned, room in [*by_size, *((turned, 0.0) for of_size in sets for turned in of_size)]:
        if (found := _least(turned, job, now, measure, room=room)) is not None:
            return tuple(_with_savings(found, job, measure))
    return None


_Turned = tuple[tuple[Knob, Sequence[object]], ...]


_Set = list[tuple[Knob, object]]


def _least(turned: _Turned, job: JobSettings, now: MemoryEstimate, measure: Measure, *, room: float) -> _Set | None:
    """Each knob of the set at the mildest level at which all together still fit.

    `room` is the share of what all requests need (or of what there is, if that is less) that the KV cache has to hold.
    """

    def good(values: Sequence[object]) -> bool:
        found = measure(_applied(job, [(knob, value) for (knob, _), value in zip(turned, values, strict=True)]))
        return found.fits and found.kv_tokens >= room * min(found.kv_wanted, now.kv_tokens)

    values = _start(turned, good)
    if values is None:
        return None
    for place in reversed(range(len(turned))):
        for milder in turned[place][1]:
            trial = [*values[:place], milder, *values[place + 1 :]]
            if good(trial):
                values = trial
                break
    return [(knob, value) for (knob, _), value in zip(turned, values, strict=True)]


def _start(turned: _Turned, good: Callable[[Sequence[object]], bool]) -> list[object] | None:
    """All knobs as far as they go; the share of the engine by each of its levels, because less is not always better."""
    far = [levels[-1] for _, levels in turned]
    place = next((i for i, (knob, _) in enumerate(turned) if knob.setting == "mem_fraction_static"), None)
    trials = [far] if place is None else [[*far[:place], level, *far[place + 1 :]] for level in turned[place][1]]
    return next((trial for trial in trials if good(trial)), None)


def _applied(job: JobSettings, values: Sequence[tuple[Knob, object]]) -> JobSettings:
    changed: dict[str, object] = {knob.setting: value for knob, value in values}
    return replace(job, **changed)  # pyright: ignore[reportArgumentType]


def _with_savings(found: _Set, job: JobSettings, measure: Measure) -> Iterator[PlannedChange]:
    before = measure(job).peak
    for knob, value in found:
        job = _applied(job, [(knob, value)])
        after = measure(job).peak
        yield PlannedChange(setting=knob.setting, value=value, saves=round(before - after, 2), costs=knob.costs)
        before = after


def applied(job: JobSettings, found: Sequence[PlannedChange]) -> JobSettings:
    return replace(job, **{change.setting: change.value for change in found})  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The job as it is asked for, and with the changes that make it fit (the same where none do, or none have to)."""

    model: Model
    transport: Transport
    now: MemoryEstimate
    changes: tuple[PlannedChange, ...] | None
    job: JobSettings
    then: MemoryEstimate


def fit(
    model: Model,
    placement: Placement,
    machine: Machine,
    job: JobSettings,
    transport: Transport,
) -> Fit:
    """Find the changes that make a job fit. Deltas take a little memory; a hand-over excludes one of the changes."""

    def measure(job: JobSettings) -> MemoryEstimate:
        return memory_of(model, placement, machine, job, transport)

    found = changes(job, measure, handover=transport == "handover")
    then = applied(job, found or ())
    return Fit(model=model, transport=transport, now=measure(job), changes=found, job=then, then=measure(then))


def planned_memory(found: Fit, host_has: float | None) -> PlannedMemory:
    """The memory as a plan shows it. `host_has` is the host's memory in GiB, None where it was not given."""
    version = version_bytes(found.model, found.job) / GIB
    fault = host_fault(found.transport, version, host_has) if host_has is not None else None
    return PlannedMemory(
        fits=found.now.fits and fault is None,
        faults=found.now.faults if fault is None else (*found.now.faults, fault),
        processes=found.now.processes,
        changes=found.changes,
        after=found.then.processes,
        kv_tokens=found.now.kv_tokens,
        kv_wanted=found.now.kv_wanted,
        host=round(versions_on_root(found.transport) * version, 2),
        host_has=host_has,
    )


def version_bytes(model: Model, job: JobSettings) -> float:
    parameters = model.parameters if job.lora_rank is None else lora_parameters(model, job.lora_rank)
    return WEIGHT_BYTES * parameters


def assumed_of_memory(transport: Transport, host_has: float | None) -> list[str]:
    """What every prediction of memory takes for granted."""
    unknown = "" if host_has is not None else ", whose size was not given (--host-memory)"
    return [
        "engines start before trainers, on GPUs that no other program uses",
        f"{GPU_HEADROOM:.0%} of each GPU stays free",
        "attention is fused: scores are not stored",
        f"with a root on a tmpfs the host's memory holds {on_root(transport)}{unknown}",
        "a critic or a reward model beside the trainer is not planned for",
    ]
