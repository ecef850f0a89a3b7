"""What a delta holds: for each tensor that changed, the flat indices of the changed elements and their new bits.

`plan_delta` decides whether a version goes out as a delta or in full, and `ChangeHistory` has what has changed since
which base.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from math import prod
from threading import Event
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from refitd_client.checkpoint.finite import any_nonfinite, count_nonfinite, kind_of
from refitd_client.checkpoint.header import BITS, Entry
from refitd_client.contract.naming import parse_version_id
from refitd_client.contract.wire import Engine
from refitd_client.fingerprint import Bits, bits_of, fingerprint, to_text, updated, width_of
from refitd_client.lanes import in_lanes, lanes_for
from refitd_client.publish.options import DeltaRules
from refitd_client.publish.ports import Full

Indices = NDArray[np.unsignedinteger[Any]]

MANY_CHANGES = 2**17  # from which on it is worth waking threads for them
_COMPARED = 2**18  # elements compared at a time: the result is still in the processor's cache when it is searched


class DeltaRefusedError(ValueError):
    """A delta that cannot be read, or must not be applied here. The message is a sentence."""


@lru_cache(4096)  # it is asked several times for each of a model's tensors, and they have few shapes
def elements_of(dtype: str, shape: tuple[int, ...]) -> int:
    """How many elements a tensor has. Types below a byte are counted by bytes."""
    return prod(shape) * BITS[dtype] // 8 // width_of(dtype)


def index_type(elements: int) -> type[np.uint32] | type[np.uint64]:
    """The type of a tensor's flat indices: 32 bits wherever they are enough."""
    return np.uint32 if elements <= 2**32 else np.uint64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Change:
    """The changes of one tensor: flat indices in strict order, and the new bits at them.

    `base` and `result` are the tensor's fingerprints in the base and with the change. Values are absolute, so applying
    a change twice does what applying it once does, and applying it again repairs an application that was cut off.
    """

    dtype: str
    shape: tuple[int, ...]
    indices: Indices
    values: Bits
    base: int
    result: int

    @property
    def elements(self) -> int:
        return elements_of(self.dtype, self.shape)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Delta:
    """All changes from version `base` to `version` (ids). Tensors that are not named did not change.

    It lists every element that changed in any version since the base. So it leads to `version` from each version in
    between as well.
    """

    base: str
    version: str
    changes: Mapping[str, Change]

    @property
    def changed(self) -> int:
        return sum(len(change.indices) for change in self.changes.values())


def changed(old: Bits, new: Bits) -> Indices:
    """The flat indices, in order, at which two tensors' bits differ. Either may be a mapped file.

    Bits are compared: -0.0 differs from 0.0, and a NaN equals itself.

    Raises:
        ValueError: the arrays have different dtypes or shapes.
    """
    if old.dtype != new.dtype or old.shape != new.shape:
        raise ValueError(f"{old.dtype} of shape {old.shape} cannot be compared with {new.dtype} of shape {new.shape}")
    kind = index_type(len(new))
    found = [
        (np.flatnonzero(old[begin : begin + _COMPARED] != new[begin : begin + _COMPARED]) + begin).astype(kind)
        for begin in range(0, len(new), _COMPARED)
    ]
    return np.concatenate(found) if found else np.empty(0, kind)


def union(parts: list[Indices]) -> Indices:
    """All indices that are in any of some strictly ordered arrays, in strict order."""
    if len(parts) == 1:
        return parts[0]
    merged = np.sort(np.concatenate(parts), kind="stable")  # stable: it merges runs that are in order already
    is_first = np.ones(len(merged), bool)
    np.not_equal(merged[1:], merged[:-1], out=is_first[1:])
    return merged[is_first]


def rows_in_memory(arrays: Sequence[NDArray[Any]]) -> Iterator[NDArray[Any]]:
    """Flat arrays of one type, without a copy: those that follow each other in memory as one view.

    A delta's arrays lie so in its file, and as a GPU has sent them. One numpy operation on all of them is better than
    one on each: beside a busy Python thread each operation costs a wait for the interpreter's lock.
    """
    first, end = 0, 0
    for number, array in enumerate(arrays):
        if number and not (array.__array_interface__["data"][0] == end and _is_next(arrays[first], array)):
            yield _as_one(arrays[first:number])
            first = number
        end = int(array.__array_interface__["data"][0]) + array.nbytes
    if arrays:
        yield _as_one(arrays[first:])


def together(arrays: Sequence[NDArray[Any]]) -> NDArray[Any] | None:
    """One view over all of these; None where they do not follow each other in memory."""
    rows = list(islice(rows_in_memory(arrays), 2))
    return rows[0] if len(rows) == 1 and rows[0].flags.c_contiguous else None


def in_a_row(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Flat arrays of one type as one: without a copy where they follow each other in memory."""
    there = together(arrays)
    return np.concatenate(arrays) if there is None else there


def _is_next(first: NDArray[Any], array: NDArray[Any]) -> bool:
    """Whether both are parts of one memory: neighbours by chance are freed separately."""
    if array.dtype != first.dtype or not array.flags.c_contiguous or not first.flags.c_contiguous:
        return False
    return (first.base is not None and array.base is first.base) or _memory_owner(array) == _memory_owner(first)


def _as_one(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    if len(arrays) == 1:
        return arrays[0]
    total = sum(len(array) for array in arrays)
    return np.lib.stride_tricks.as_strided(arrays[0], shape=(total,), strides=(arrays[0].itemsize,))


def _memory_owner(array: NDArray[Any]) -> int:
    base: Any = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    return id(base.obj) if isinstance(base, memoryview) else id(cast("object", base))


_CHECKED_AT_ONCE = 2**20  # values that one thread checks at a time

Targets = Mapping[str, tuple[Entry, NDArray[np.uint8]]]
"""Tensors to change: the header entry of each, and its bytes in row-major order, writable."""


def apply(delta: Delta, targets: Targets, fingerprints: Mapping[str, int] | None = None) -> dict[str, int]:
    """Bring tensors in memory from the delta's base, or a version between it and the result, to the result.

    For readers other than refitd's own (docs/delta-format.md). Nothing is written before all of the delta is known to
    fit. Applying is idempotent. If it is stopped in the middle, the tensors are neither the old version nor the new one
    until it is applied again: keep readers away meanwhile.

    Args:
        delta: what `parse_delta` returned.
        targets: at least the tensors that the delta names.
        fingerprints: the tensors' present fingerprints, if they are known: then only the changed elements are read.
            Without them each changed tensor is read whole.

    Returns:
        The fingerprints of the changed tensors, which are those that the delta promises.

    Raises:
        DeltaRefusedError: it does not fit the targets (then nothing was written), or the result is not the promised
            one: the tensors were of another version, and now are of none.
    """
    entries = {name: entry for name, (entry, _) in targets.items()}
    check_fits({name: (change.dtype, change.shape) for name, change in delta.changes.items()}, entries)
    results: dict[str, int] = {}
    for name, change in delta.changes.items():
        bits = bits_of(targets[name][1], width_of(change.dtype))
        before = (fingerprints or {}).get(name)
        after = None if before is None else updated(before, change.indices, bits[change.indices], change.values)
        bits[change.indices] = change.values
        results[name] = fingerprint(bits) if after is None else after
    for name, found in results.items():
        expected = delta.changes[name].result
        if found != expected:
            raise DeltaRefusedError(
                f"tensor {name} has fingerprint {to_text(found)} with the delta to {delta.version}, and should have "
                f"{to_text(expected)}: it was neither that of {delta.base} nor of a version since; load a full version"
            )
    return results


def check_fits(changed: Mapping[str, tuple[str, tuple[int, ...]]], entries: Mapping[str, Entry]) -> None:
    """Check that a model has the tensors that a delta changes, with their dtypes and shapes. Raises DeltaRefusedError
    if it does not.
    """
    for name, (dtype, shape) in changed.items():
        entry = entries.get(name)
        if entry is None:
            raise DeltaRefusedError(f"the delta changes tensor {name}, which is not there")
        if (entry.dtype, entry.shape) != (dtype, shape):
            raise DeltaRefusedError(
                f"the delta changes tensor {name} as {dtype} of shape {list(shape)}, and it is "
                f"{entry.dtype} of shape {list(entry.shape)}"
            )


def nonfinite_in(changes: Mapping[str, Change]) -> dict[str, int]:
    """How many new values are NaN or infinite (of scales: or not above 0), by tensor; tensors without any are left out.

    Nearly every delta has none. So values that lie together in memory, as in a file, are first checked together, and
    not in some hundred steps.
    """
    kinds = {name: kind_of(name, change.dtype) for name, change in changes.items()}
    by_kind: dict[str, list[NDArray[Any]]] = {}
    for name, change in changes.items():
        by_kind.setdefault(kinds[name], []).append(change.values)
    joined = {kind: together(arrays) for kind, arrays in by_kind.items()}
    if all(values is not None and not _has_nonfinite(kind, values) for kind, values in joined.items()):
        return {}
    counted = {name: count_nonfinite(kinds[name], _bytes(each.values)) for name, each in changes.items()}
    return {name: count for name, count in counted.items() if count}


def _has_nonfinite(kind: str, values: NDArray[Any]) -> bool:
    """Whether any value is NaN or infinite, checked on as many cores as that is worth."""
    begins = range(0, len(values), _CHECKED_AT_ONCE)
    found = [False] * len(begins)

    def check(number: int, _: Event) -> None:
        found[number] = any_nonfinite(kind, _bytes(values[begins[number] : begins[number] + _CHECKED_AT_ONCE]))

    in_lanes([partial(check, number) for number in range(len(begins))], lanes=lanes_for(len(begins)))
    return any(found)


def _bytes(values: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(values).view(np.uint8)


def plan_delta(base: str | Full, changed: int, since_anchor: int, rules: DeltaRules, *, elements: int) -> str | Full:
    """Decide between a delta, by the id of its base, and a full version.

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
    return base


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
        return sum(len(indices) for indices in self.indices.values())


class ChangeHistory:
    """The changes of the last versions, so that a delta can list every element that changed since its base."""

    def __init__(self, first: str, room: int) -> None:
        """Begin at version `first`. At most `room` indices (4 bytes each) are kept, and those of the last step."""
        self._first = first  # the oldest version all changes since which are known
        self._room = room
        self._steps: deque[StepChanges] = deque()

    def add(self, step: StepChanges) -> None:
        self._steps.append(step)
        while len(self._steps) > 1 and sum(each.changed for each in self._steps) > self._room:
            self._first = self._steps.popleft().version

    def knows(self, version: str) -> bool:
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
