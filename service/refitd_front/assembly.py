"""An update that comes in parts: what has arrived of it, and whether that is a version. Pure.

Trainers' calls say neither which version the weights will be nor which part is the last one. An update is whole at its
end if every part has arrived, no tensor came twice, and the tensors are those of the version before, with the same
dtypes and shapes. Patches of tensors are held against the files that they change, where they are written. What has once
gone wrong stays wrong until the next update: a call that is made again gets the same answer.

A trainer may send each part's call to all of its engines, in the same order to each. The first call begins a receive,
and those to the others wait for the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from refitd_client.checkpoint.header import BITS
from refitd_client.contract.naming import is_tensor_name
from refitd_client.tensors import DTYPES
from refitd_front.handles import Handles

Kind = tuple[str, tuple[int, ...]]
"""A tensor's dtype (safetensors' name) and shape."""


class PartRefusedError(ValueError):
    """A part is not taken, or an update is no version. The message is a sentence."""


@dataclass(frozen=True, slots=True)
class UpdatePart:
    """What the call of a part names.

    Attributes:
        group: the trainer's group that it comes by.
        tensors: (name, safetensors' dtype, shape) of each in turn.
        counts: of a patch, how many elements of each tensor it changes; else empty.
        is_flat: the tensors come as one, side by side.
        handles: where they lie in the trainer's GPU memory; None where they are sent.
    """

    group: str
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    counts: tuple[int, ...] = ()
    is_flat: bool = False
    handles: Handles | None = None


def sent_part(
    group: str,
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    *,
    counts: Sequence[int] | None = None,
    is_flat: bool = False,
    handles: Handles | None = None,
) -> UpdatePart:
    """What a call names, checked by itself: the tensors in the order in which they are sent, with torch's names of
    their dtypes.

    Raises:
        PartRefusedError: it cannot be one.
    """
    if not names or not len(names) == len(dtypes) == len(shapes):
        raise PartRefusedError("the call names no tensor, or not as many names as dtypes and shapes")
    tensors: list[tuple[str, str, tuple[int, ...]]] = []
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        kind = DTYPES.get(dtype.removeprefix("torch."), "")
        if not is_tensor_name(name) or BITS.get(kind, 0) < 8 or any(size < 0 for size in shape):
            raise PartRefusedError(f"no version can hold the tensor {name!r} with dtype {dtype} and shape {shape}")
        tensors.append((name, kind, tuple(shape)))
    if len(set(names)) != len(names):
        raise PartRefusedError("the call names a tensor twice")
    if counts is not None and (len(counts) != len(names) or any(count < 0 for count in counts)):
        raise PartRefusedError("the call does not say for each tensor how many of its elements change")
    if handles is not None:
        handles.check(tensors)
    return UpdatePart(group, tuple(tensors), tuple(counts or ()), is_flat, handles)


@dataclass(slots=True)
class _Part:
    bucket: UpdatePart
    arrived: bool = False


@dataclass(slots=True)
class Assembly:
    """What has arrived since the update began. `earlier` are the tensors of the version before, None at first."""

    earlier: Mapping[str, Kind] | None = None
    _parts: list[_Part] = field(default_factory=list[_Part])
    _told: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    _tensors: dict[str, Kind] = field(default_factory=dict[str, Kind])
    _wrong: str = ""

    @property
    def is_empty(self) -> bool:
        return not self._parts and not self._wrong

    def announced(self, engine: str, bucket: UpdatePart, *, kept: bool) -> tuple[int, bool]:
        """Take a part's call to an engine.

        Args:
            kept: whether the tensors are the version's; else the same come by another group.

        Returns:
            The part's number, from 1 on, and whether this call is the first of it.

        Raises:
            PartRefusedError: the update is no version any more.
        """
        self.check()
        told = self._told[engine, bucket.group] = self._told.get((engine, bucket.group), 0) + 1
        same = [number for number, part in enumerate(self._parts, start=1) if part.bucket.group == bucket.group]
        if told <= len(same):
            number = same[told - 1]
            if self._parts[number - 1].bucket != bucket:
                raise self.broken(f"part {told} is another one for {engine} than for the engine before it")
            return number, False
        if bool(bucket.counts) != bool(self._parts[0].bucket.counts if self._parts else bucket.counts):
            raise self.broken("patches and whole tensors have come in one update")
        if kept and not bucket.counts:
            self._take(bucket)
        self._parts.append(_Part(bucket))
        return len(self._parts), True

    def _take(self, bucket: UpdatePart) -> None:
        for name, dtype, shape in bucket.tensors:
            if name in self._tensors:
                raise self.broken(f"tensor {name} was sent twice, in two buckets")
            before = None if self.earlier is None else self.earlier.get(name)
            if self.earlier is not None and before is None:
                raise self.broken(f"tensor {name} was not in the version before")
            if before is not None and before != (dtype, shape):
                raise self.broken(f"tensor {name} is {_said((dtype, shape))}, and was {_said(before)} before")
        self._tensors |= {name: (dtype, shape) for name, dtype, shape in bucket.tensors}

    def has_arrived(self, number: int) -> None:
        self._parts[number - 1].arrived = True

    def broken(self, reason: str) -> PartRefusedError:
        """The update is no version any more; the first reason stays. What is returned says it."""
        self._wrong = self._wrong or reason
        return PartRefusedError(f"{self._wrong}: nothing of this update is published")

    def check(self) -> None:
        """Look whether the update can still become a version.

        Raises:
            PartRefusedError: it cannot.
        """
        if self._wrong:
            raise self.broken(self._wrong)

    def whole(self) -> Mapping[str, Kind] | None:
        """The tensors of the version that has arrived; None where it consists of patches.

        Raises:
            PartRefusedError: it is none.
        """
        self.check()
        coming = [part.bucket.tensors[0][0] for part in self._parts if not part.arrived]
        if coming:
            raise self.broken(f"the bucket that begins with {coming[0]} has not arrived")
        if self._parts and self._parts[0].bucket.counts:
            return None
        missing = sorted((self.earlier or {}).keys() - self._tensors.keys())
        if missing:
            raise self.broken(
                f"tensor {missing[0]} is missing, and {len(missing) - 1} more of the {len(self.earlier or ())} tensors "
                "that the version before had"
            )
        return dict(self._tensors)


def _said(kind: Kind) -> str:
    return f"{kind[0]} {list(kind[1])}"
