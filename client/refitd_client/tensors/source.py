"""A tensor that was checked and not yet read, whichever library it came from, and the dtype that it is published in.

`TensorSource.read()` returns a tensor's bytes in host memory, one tensor at a time, so that publishing a model from a
GPU takes no more host memory than its largest tensor.

A cast rounds each element by itself, so casting a part and taking a part of the cast are the same. Integers, booleans
and 8-bit floats (whose scales only the model knows) are never cast.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from refitd_client.checkpoint.header import METADATA_KEY, Entry
from refitd_client.errors import InvalidWeightsError

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0", "float4_e2m1fn_x2": "F4",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""safetensors' names of dtypes by torch's, which numpy (with ml_dtypes) shares."""

TORCH_NAMES = {name: torch for torch, name in DTYPES.items()}
FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})

HOST = "host"


@dataclass(slots=True, eq=False)
class TensorRef:
    """The trainer's tensor, for the length of a publication. The next one's may take its place (`reuse.py`)."""

    value: Any


def _nothing() -> Any:
    raise NotImplementedError("this source has no bytes, or no torch tensor")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSource:
    """One tensor. `read` returns its bytes in row-major order; `memory` is equal for names of the same bytes, if any.

    `place` is where these bytes are: `HOST`, or a GPU by its name (`cuda:0`). `tensor` returns a torch tensor with
    them, in that place, without a copy in host memory. If it `is_view`, that takes no memory, and the bytes are at
    `address` there; else, as after a cast, it is a new one each time. `held` is the torch tensor to read, if any.
    """

    entry: Entry
    read: Callable[[], NDArray[np.uint8]] = _nothing
    memory: Hashable | None
    place: str = HOST
    tensor: Callable[[], Any] = _nothing
    is_view: bool = False
    address: int = 0
    held: TensorRef | None = None


@dataclass(frozen=True, slots=True)
class Casts:
    """The first pattern that a published name matches decides; without one the dtype stays. Dtypes by torch's names."""

    rules: tuple[tuple[str, str], ...] = ()

    def target(self, name: str, dtype: str) -> str:
        """The dtype in which a tensor is published."""
        if dtype not in FLOATS:
            return dtype
        return next((new for pattern, new in self.rules if fnmatchcase(name, pattern)), dtype)


def casts(dtype: Any) -> Casts:
    """Read a caller's `dtype`: one for all tensors, a mapping of patterns (`*.router.*`) to dtypes, or None.

    Dtypes are torch's (`torch.bfloat16`) or their names (`"bfloat16"`).

    Raises:
        ValueError: weights cannot be cast to a dtype.
    """
    if dtype is None:
        return Casts()
    rules = cast("Mapping[Any, Any]", dtype) if isinstance(dtype, Mapping) else {"*": dtype}
    named = {str(pattern): str(new).removeprefix("torch.") for pattern, new in rules.items()}
    for name in named.values():
        if name not in FLOATS:
            raise ValueError(f"dtype {name}: weights are cast to one of {', '.join(sorted(FLOATS))}")
    return Casts(tuple(named.items()))


def refused(name: str, why: str) -> InvalidWeightsError:
    """The error for a tensor that cannot be published."""
    return InvalidWeightsError(f"tensor {name} {why}", tensor=name)


def entry_of(name: str, dtype: str, shape: tuple[int, ...]) -> Entry:
    """A tensor's entry in the header.

    Args:
        name: the published one.
        dtype: torch's or numpy's name of it.
        shape: as torch or numpy counts elements.

    Raises:
        InvalidWeightsError: the format cannot hold it.
    """
    if name == METADATA_KEY:
        raise refused(name, "has a name that safetensors keeps for itself: rename it")
    if dtype not in DTYPES:
        raise refused(name, f"has dtype {dtype}, which cannot be served: convert it, or leave it out")
    if dtype == "float4_e2m1fn_x2":  # torch counts pairs, the file counts elements
        if not shape:
            raise refused(name, f"is one {dtype} without a dimension to count its elements in: reshape it to (1,)")
        shape = (*shape[:-1], shape[-1] * 2)
    return Entry(name=name, dtype=DTYPES[dtype], shape=shape)


def numpy_source(name: str, array: NDArray[Any]) -> TensorSource:
    """A numpy array as a source.

    Raises:
        InvalidWeightsError: its dtype cannot be served.
    """

    def read() -> NDArray[np.uint8]:
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        return np.ascontiguousarray(little).reshape(-1).view(np.uint8)

    memory = "numpy", array.__array_interface__["data"][0], array.dtype.str, array.shape, array.strides
    entry = entry_of(name, array.dtype.name, array.shape)
    return TensorSource(entry=entry, read=read, memory=memory if array.size else None)
