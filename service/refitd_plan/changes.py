"""The smallest set of changes that makes a job fit, and what each saves. Pure.

Sets are tried by size, and among sets of one size in the order of `KNOBS`, so that what costs least comes first, and
what changes the learning itself (how many prompts a step, how long the answers) last; those that leave the KV cache
room for all requests at once before those that make some of them wait. Those that starve it, so that most requests
wait, come after all others: one setting more is the smaller price. Within a set each knob is turned as far as it goes;
where that fits, each is turned back as far as the job still fits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from refitd_plan.job import Job
from refitd_plan.memory import Memory

Measure = Callable[[Job], Memory]

_LEAST_FRACTION, _MOST_FRACTION, _FRACTION_STEP = 0.1, 0.9, 0.05
_LEAST_ANSWER = 128
_LEAST_MICRO_BATCH = 1024
_ROOMS = (1.0, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One setting that can be changed. `levels` gives the values to try, the mildest first; none where it cannot."""

    setting: str
    levels: Callable[[Job, Memory], Sequence[object]]
    costs: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change. `saves` is GiB over all processes, at its place in the order."""

    setting: str
    value: object
    saves: float
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


def _fractions(_: Job, now: Memory) -> list[float]:
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


def changes(job: Job, measure: Measure, *, handover: bool) -> tuple[Change, ...] | None:
    """The changes that make the job fit, in order; none where it fits, None where no set does.

    Args:
        job: the job as it is asked for.
        measure: the memory of a job.
        handover: tensors are handed over by CUDA IPC, which expandable segments would rule out.
    """
    now = measure(job)
    if now.fits:
        return ()
    knobs = [knob for knob in KNOBS if not (handover and knob.setting == "expandable_segments")]
    sets = list(_sets(knobs, job, now))
    by_size = [(turned, room) for of_size in sets for room in _ROOMS for turned in of_size]
    for turned, room in [*by_size, *((turned, 0.0) for of_size in sets for turned in of_size)]:
        if (found := _least(turned, job, now, measure, room=room)) is not None:
            return tuple(_told(found, job, measure))
    return None


_Turned = tuple[tuple[Knob, Sequence[object]], ...]
_Set = list[tuple[Knob, object]]


def _sets(knobs: list[Knob], job: Job, now: Memory) -> Iterator[list[_Turned]]:
    """The sets of one knob, of two, and so on."""
    movable = [(knob, levels) for knob in knobs if (levels := knob.levels(job, now))]
    for size in range(1, len(movable) + 1):
        yield list(combinations(movable, size))


def _least(turned: _Turned, job: Job, now: Memory, measure: Measure, *, room: float) -> _Set | None:
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


def _applied(job: Job, values: Sequence[tuple[Knob, object]]) -> Job:
    changed: dict[str, object] = {knob.setting: value for knob, value in values}
    return replace(job, **changed)  # pyright: ignore[reportArgumentType]


def _told(found: _Set, job: Job, measure: Measure) -> Iterator[Change]:
    before = measure(job).peak
    for knob, value in found:
        job = _applied(job, [(knob, value)])
        after = measure(job).peak
        yield Change(setting=knob.setting, value=value, saves=before - after, costs=knob.costs)
        before = after


def applied(job: Job, found: Sequence[Change]) -> Job:
    """The job with changes made."""
    return replace(job, **{change.setting: change.value for change in found})  # pyright: ignore[reportArgumentType]
