"""A tensor that was checked and not yet read, whichever library it came from.

`TensorSource.read()` gives a tensor's bytes in host memory, one tensor at a time, so that publishing a model from a
GPU takes no more host memory than its largest tensor.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

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
"""The other way round."""

HOST = "host"


def _no_tensor() -> Any:
    raise NotImplementedError("this source has no torch tensor")


@dataclass(slots=True, eq=False)
class Held:
    """The trainer's tensor, for the length of a publication. The next one's may take its place (`same_tensors.py`)."""

    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSource:
    """One tensor. `read` gives its bytes in order of index; `memory` is equal for names of the same bytes, if any.

    `place` is where these bytes are: `HOST`, or a GPU by its name (`cuda:0`). `tensor` gives a torch tensor with them,
    in that place, for those who can do without a copy in host memory. If it `is_view`, that takes no memory, and the
    bytes are at `address` there; else, as after a cast, it is a new one each time. `held` is what they read, if it is a
    torch tensor.
    """

    entry: Entry
    read: Callable[[], NDArray[np.uint8]]
    memory: Hashable | None
    place: str = HOST
    tensor: Callable[[], Any] = _no_tensor
    is_view: bool = False
    address: int = 0
    held: Held | None = None


def refused(name: str, why: str) -> InvalidWeightsError:
    """The error for a tensor that cannot be published."""
    return InvalidWeightsError(f"tensor {name} {why}", tensor=name)


def entry_of(name: str, dtype: str, shape: tuple[int, ...]) -> Entry:
    """What the header will say of a tensor with torch's or numpy's `dtype`.

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
