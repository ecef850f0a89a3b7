"""Whether a version goes out as a delta or in full, and what has changed since which base. Pure."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from refitd_client.contract.naming import parse_version_id
from refitd_client.contract.wire import Engine
from refitd_client.delta.change import Indices, union


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRules:
    """When a delta is worth it.

    `threshold` is the share of all elements that it may list: 0.1 of bf16 takes a third of the full version's bytes.
    Every `anchor_every`th version is full, so that a reader who lost everything has few deltas to go through.
    """

    threshold: float = 0.1
    anchor_every: int = 20

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: `threshold` is not between 0 and 1, or `anchor_every` is below 1.
        """
        if not 0.0 <= self.threshold <= 1.0:
            raise ValueError(f"threshold is {self.threshold}; it is a share of all elements, from 0 to 1")
        if self.anchor_every < 1:
            raise ValueError(f"anchor_every is {self.anchor_every}; 1 makes every version a full one")

    def most(self, elements: int) -> int:
        """How many of so many elements a delta may list. All checks of the threshold use this number."""
        return int(self.threshold * elements)


@dataclass(frozen=True, slots=True)
class Full:
    """Publish in full. `why` is a sentence for people."""

    why: str


@dataclass(frozen=True, slots=True)
class FromBase:
    """Publish a delta against version `base`."""

    base: str


def plan_delta(
    base: str | Full, changed: int, since_anchor: int, rules: DeltaRules, *, elements: int
) -> FromBase | Full:
    """Decide between a delta and a full version.

    `base` is the id of a version that engines serve and all changes since which are known, or why there is none; since
    then `changed` of all `elements` changed. `since_anchor` versions were published since the last full one.
    """
    if isinstance(base, Full):
        return base
    if since_anchor + 1 >= rules.anchor_every:
        return Full(f"an anchor: {since_anchor} deltas were published since the last full version")
    if changed > rules.most(elements):
        return Full(
            f"{changed / max(1, elements):.2%} of all elements changed since {base}, more than {rules.threshold:.2%}"
        )
    return FromBase(base)


def last_served(engines: Iterable[Engine], run: str) -> str | Full:
    """The id of the oldest version that a run's reachable engines serve, or why there is none.

    A delta from it lists what changed in any version since, so it also fits the engines that serve a newer one.
    """
    counted = [engine for engine in engines if engine.run == run and engine.state.is_waited_for]
    if not counted:
        return Full(f"no engine of run {run} can be reached")
    found: dict[str, tuple[int, int]] = {}
    for engine in counted:
        parsed = None if engine.version is None else parse_version_id(engine.version)
        if engine.version is None or parsed is None or parsed[0] != run:
            return Full(f"engine {engine.id} serves no version of run {run} yet")
        found[engine.version] = (parsed[1].generation, parsed[1].step)
    return min(found, key=lambda version: found[version])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepChanges:
    """What changed from a base (as a rule the version before) to `version`.

    `indices` are the changed elements by tensor, `before` the fingerprints of these tensors in the base.
    """

    version: str
    indices: Mapping[str, Indices]
    before: Mapping[str, int]

    @property
    def changed(self) -> int:
        """How many elements changed."""
        return sum(len(indices) for indices in self.indices.values())


class ChangeHistory:
    """The changes of the last versions, so that a delta can list every element that changed since its base."""

    def __init__(self, first: str, room: int) -> None:
        """Begin at version `first`. At most `room` indices (4 bytes each) are kept, and those of the last step."""
        self._first = first  # the oldest version all changes since which are known
        self._room = room
        self._steps: deque[StepChanges] = deque()

    def add(self, step: StepChanges) -> None:
        """Add the changes of a version that was published."""
        self._steps.append(step)
        while len(self._steps) > 1 and sum(each.changed for each in self._steps) > self._room:
            self._first = self._steps.popleft().version

    def knows(self, version: str) -> bool:
        """Whether all changes since a version are known."""
        return version == self._first or any(step.version == version for step in self._steps)

    def forget_before(self, version: str) -> None:
        """Forget the changes up to a known version: no engine serves an older one."""
        while self._first != version:
            self._first = self._steps.popleft().version

    def since(self, base: str, last: StepChanges) -> StepChanges:
        """All changes since a known version, up to and with `last`, which was not added yet."""
        steps = self._after(base, last)
        if len(steps) == 1:
            return last
        parts: dict[str, list[Indices]] = {}
        before: dict[str, int] = {}
        for step in steps:
            for name, indices in step.indices.items():
                parts.setdefault(name, []).append(indices)
                before.setdefault(name, step.before[name])
        indices = {name: union(found) for name, found in parts.items()}
        return StepChanges(version=last.version, indices=indices, before=before)

    def most_since(self, base: str, last: StepChanges) -> int:
        """The number of these changes at most: as if no two steps had changed the same element."""
        return sum(step.changed for step in self._after(base, last))

    def _after(self, base: str, last: StepChanges) -> list[StepChanges]:
        steps = list(self._steps)
        if base != self._first:
            steps = steps[1 + [step.version for step in steps].index(base) :]
        return [*steps, last]
