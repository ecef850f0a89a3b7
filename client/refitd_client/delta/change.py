"""What a delta holds: for each tensor that changed, where, and what is there now."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refitd_client.checkpoint.header import BITS
from refitd_client.fingerprint import Bits, width_of

Indices = NDArray[np.unsignedinteger[Any]]


class DeltaRefusedError(ValueError):
    """A delta that cannot be read, or must not be applied here. The message is a sentence."""


def elements_of(dtype: str, shape: tuple[int, ...]) -> int:
    """How many elements a tensor has, types below a byte being counted by bytes."""
    return prod(shape) * BITS[dtype] // 8 // width_of(dtype)


def index_type(elements: int) -> type[np.uint32] | type[np.uint64]:
    """The type of a tensor's flat indices: 32 bits wherever they are enough."""
    return np.uint32 if elements <= 2**32 else np.uint64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Change:
    """One tensor's: flat indices in strict order, and the bits that are there now, whatever was there before.

    `base` and `result` are the tensor's fingerprints in the base and with the change. Because values are absolute,
    applying it twice does what applying it once does, and half an application is mended by a whole one.
    """

    dtype: str
    shape: tuple[int, ...]
    indices: Indices
    values: Bits
    base: int
    result: int

    @property
    def elements(self) -> int:
        """How many the tensor has, changed or not."""
        return elements_of(self.dtype, self.shape)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Delta:
    """The way from version `base` to `version`, both by id; tensors that are not named did not change.

    Every element is listed that changed in any version since the base. So it leads to `version` from each version in
    between as well.
    """

    base: str
    version: str
    changes: Mapping[str, Change]

    @property
    def changed(self) -> int:
        """How many elements it lists."""
        return sum(len(change.indices) for change in self.changes.values())


def union(parts: list[Indices]) -> Indices:
    """All indices that are in any of some strictly ordered arrays, in strict order."""
    if len(parts) == 1:
        return parts[0]
    together = np.sort(np.concatenate(parts), kind="stable")  # stable: merges what is in order already
    is_first = np.ones(len(together), bool)
    np.not_equal(together[1:], together[:-1], out=is_first[1:])
    return together[is_first]
