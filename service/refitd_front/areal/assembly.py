"""An update that comes in buckets: what has arrived of it, and whether that is a version. Pure.

AReaL's calls name no version, and none says which bucket is the last one. So an update begins with a pause and is
complete when generation is to go on: it is whole if every bucket has arrived, no tensor came twice, and the tensors are
those of the version before, with the same dtypes and shapes. What has once gone wrong stays wrong until the next pause:
a call that is made again gets the same answer.

AReaL sends each bucket's call to all of its engines. The first one begins a receive, and those of the others wait for
the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from refitd_client.checkpoint.header import BITS
from refitd_client.contract.naming import is_tensor_name
from refitd_client.tensors import DTYPES

Kind = tuple[str, tuple[int, ...]]
"""A tensor's dtype (safetensors' name) and shape."""


class BucketRefusedError(ValueError):
    """A bucket is not taken, or an update is no version. The message is a sentence."""


@dataclass(frozen=True, slots=True)
class BucketKey:
    """What a bucket's call names: the group, and (name, safetensors' dtype, shape) of each tensor in turn."""

    group: str
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]


def bucket_key(group: str, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> BucketKey:
    """What a call names, checked by itself: the tensors in the order in which they are broadcast, with torch's names of
    their dtypes.

    Raises:
        BucketRefusedError: it cannot be one.
    """
    if not names or not len(names) == len(dtypes) == len(shapes):
        raise BucketRefusedError("the call names no tensor, or not as many names as dtypes and shapes")
    tensors: list[tuple[str, str, tuple[int, ...]]] = []
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        kind = DTYPES.get(dtype.removeprefix("torch."))
        if not is_tensor_name(name) or kind not in BITS or any(size < 0 for size in shape):
            raise BucketRefusedError(f"no version can hold the tensor {name!r} with dtype {dtype} and shape {shape}")
        tensors.append((name, kind, tuple(shape)))
    if len(set(names)) != len(names):
        raise BucketRefusedError("the call names a tensor twice")
    return BucketKey(group, tuple(tensors))


@dataclass(slots=True)
class _Bucket:
    number: int
    engines: set[str]
    arrived: bool = False


@dataclass(slots=True)
class UpdateAssembly:
    """What has arrived since the last pause. `earlier` are the tensors of the version before, None at first."""

    earlier: Mapping[str, Kind] | None = None
    _buckets: dict[BucketKey, _Bucket] = field(default_factory=dict[BucketKey, _Bucket])
    _tensors: dict[str, Kind] = field(default_factory=dict[str, Kind])
    _wrong: str = ""

    @property
    def is_empty(self) -> bool:
        return not self._buckets and not self._wrong

    def announced(self, engine: str, key: BucketKey, *, kept: bool) -> tuple[int, bool]:
        """Take a bucket's call to an engine.

        Args:
            kept: whether the tensors are the version's; else the same come by another group.

        Returns:
            The bucket's number, from 1 on, and whether this call is the first of it.

        Raises:
            BucketRefusedError: the update is no version any more.
        """
        self.check()
        known = self._buckets.get(key)
        if known is not None:
            if engine in known.engines:
                raise self.broken(f"the bucket that begins with {key.tensors[0][0]} was sent twice")
            known.engines.add(engine)
            return known.number, False
        if kept:
            self._take(key)
        self._buckets[key] = _Bucket(number := len(self._buckets) + 1, {engine})
        return number, True

    def _take(self, key: BucketKey) -> None:
        for name, dtype, shape in key.tensors:
            if name in self._tensors:
                raise self.broken(f"tensor {name} was sent twice, in two buckets")
            before = None if self.earlier is None else self.earlier.get(name)
            if self.earlier is not None and before is None:
                raise self.broken(f"tensor {name} was not in the version before")
            if before is not None and before != (dtype, shape):
                raise self.broken(f"tensor {name} is {_said((dtype, shape))}, and was {_said(before)} before")
        self._tensors |= {name: (dtype, shape) for name, dtype, shape in key.tensors}

    def has_arrived(self, key: BucketKey) -> None:
        if (bucket := self._buckets.get(key)) is not None:
            bucket.arrived = True

    def broken(self, reason: str) -> BucketRefusedError:
        """The update is no version any more; the first reason stays. What is returned says it."""
        self._wrong = self._wrong or reason
        return BucketRefusedError(f"{self._wrong}: nothing of this update is published")

    def check(self) -> None:
        """Look whether the update can still become a version.

        Raises:
            BucketRefusedError: it cannot.
        """
        if self._wrong:
            raise self.broken(self._wrong)

    def whole(self) -> Mapping[str, Kind]:
        """The tensors of the version that has arrived.

        Raises:
            BucketRefusedError: it is none.
        """
        self.check()
        coming = [key.tensors[0][0] for key, bucket in self._buckets.items() if not bucket.arrived]
        if coming:
            raise self.broken(f"the bucket that begins with {coming[0]} has not arrived")
        missing = sorted((self.earlier or {}).keys() - self._tensors.keys())
        if missing:
            raise self.broken(
                f"tensor {missing[0]} is missing, and {len(missing) - 1} more of the {len(self.earlier or ())} tensors "
                "that the version before had"
            )
        return dict(self._tensors)


def _said(kind: Kind) -> str:
    return f"{kind[0]} {list(kind[1])}"
