"""What changed in each of the last versions, so that a delta can list every element that changed since its base."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from refitd_client.delta.change import Indices, union


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """What changed from the version before to `version`. `before` are the changed tensors' fingerprints until then."""

    version: str
    indices: Mapping[str, Indices]
    before: Mapping[str, int]

    @property
    def changed(self) -> int:
        """How many elements."""
        return sum(len(indices) for indices in self.indices.values())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Since:
    """What changed since a base: every element of each tensor, and the tensor's fingerprint in the base."""

    indices: Mapping[str, Indices]
    before: Mapping[str, int]

    @property
    def changed(self) -> int:
        """How many elements."""
        return sum(len(indices) for indices in self.indices.values())


class History:
    """The versions from `first` on, in order. `first` is the oldest whose later changes are all known."""

    def __init__(self, first: str, room: int) -> None:
        """Begin at a version. At most `room` indices are remembered, of 4 bytes each, and those of the last step."""
        self._first = first
        self._room = room
        self._steps: deque[Step] = deque()

    def add(self, step: Step) -> None:
        """Another version was published."""
        self._steps.append(step)
        while len(self._steps) > 1 and sum(each.changed for each in self._steps) > self._room:
            self._first = self._steps.popleft().version

    def knows(self, version: str) -> bool:
        """Whether all changes since a version are known."""
        return version == self._first or any(step.version == version for step in self._steps)

    def forget_before(self, version: str) -> None:
        """Nobody serves anything older than a version that is known."""
        while self._first != version:
            self._first = self._steps.popleft().version

    def since(self, base: str, last: Step) -> Since:
        """All changes since a version that is known, up to and with `last`, which was not added yet."""
        steps = [*self._after(base), last]
        parts: dict[str, list[Indices]] = {}
        before: dict[str, int] = {}
        for step in steps:
            for name, indices in step.indices.items():
                parts.setdefault(name, []).append(indices)
                before.setdefault(name, step.before[name])
        return Since(indices={name: union(found) for name, found in parts.items()}, before=before)

    def most_since(self, base: str, last: Step) -> int:
        """How many elements that can be at most: as many as if no two steps had changed the same one."""
        return sum(step.changed for step in [*self._after(base), last])

    def _after(self, base: str) -> list[Step]:
        steps = list(self._steps)
        if base == self._first:
            return steps
        return steps[1 + [step.version for step in steps].index(base) :]
