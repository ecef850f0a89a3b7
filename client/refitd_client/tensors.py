"""A tensor that was checked and not yet read, whichever library it came from, and the dtype that it is published in.

`TensorSource.read()` returns a tensor's bytes in host memory, one tensor at a time, so that publishing a model from a
GPU takes no more host memory than its largest tensor.

A cast rounds each element by itself, so casting a part and taking a part of the cast are the same. Integers, booleans
and 8-bit floats (whose scales only the model knows) are never cast. `fp8_block` is no cast: `write/fp8_blocks.py`.

torch is not imported: a caller with a tensor has imported it. Nothing here can create a CUDA context: `torch.cuda` is
not called, tensors in host memory are read where they are, and one on a GPU comes with the context that it lives in.
"""

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from os import PathLike
from typing import Any, Generic, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from refitd_client.checkpoint.header import METADATA_KEY, Entry
from refitd_client.contract.naming import NO_NAME, is_tensor_name
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
FP8_BLOCK = "fp8_block"

HOST = "host"


@dataclass(slots=True, eq=False)
class TensorRef:
    """The trainer's tensor, for the length of a publication. The next one's may take its place (`SameTensors`)."""

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
    """The first pattern that a published name matches decides; without one the dtype stays. Dtypes by torch's names.

    `FP8_BLOCK` decides about weights that can be quantised; the others go on to the next pattern. Of a tensor in `kept`
    the pattern of all (`*`) decides nothing: it gets that dtype.
    """

    rules: tuple[tuple[str, str], ...] = ()
    kept: Mapping[str, str] = field(default_factory=dict[str, str])

    def target(self, name: str, dtype: str) -> str:
        if dtype not in FLOATS:
            return dtype
        for pattern, new in self.rules:
            if new != FP8_BLOCK and fnmatchcase(name, pattern):
                own = self.kept.get(name) if pattern == "*" else None
                return own if own in FLOATS else new
        return dtype

    @property
    def has_fp8_block(self) -> bool:
        return any(new == FP8_BLOCK for _, new in self.rules)

    def is_fp8_block(self, name: str) -> bool:
        """Whether a weight of this name is to be quantised, if it can be."""
        return next((new for pattern, new in self.rules if fnmatchcase(name, pattern)), None) == FP8_BLOCK


def casts(dtype: Any) -> Casts:
    """Read a caller's `dtype`: one for all tensors, a mapping of patterns (`*.router.*`) to dtypes, or None.

    Dtypes are torch's (`torch.bfloat16`), their names (`"bfloat16"`) or `"fp8_block"`.

    Raises:
        ValueError: weights cannot be cast to a dtype.
    """
    if dtype is None:
        return Casts()
    rules = cast("Mapping[Any, Any]", dtype) if isinstance(dtype, Mapping) else {"*": dtype}
    named = {str(pattern): str(new).removeprefix("torch.") for pattern, new in rules.items()}
    for name in named.values():
        if name not in FLOATS | {FP8_BLOCK}:
            raise ValueError(f"dtype {name}: weights are cast to one of {', '.join(sorted(FLOATS))}, or to {FP8_BLOCK}")
    return Casts(tuple(named.items()))


def refused(name: str, why: str) -> InvalidWeightsError:
    return InvalidWeightsError(f"tensor {name} {why}", tensor=name)


def entry_of(name: str, dtype: str, shape: tuple[int, ...]) -> Entry:
    """A tensor's entry in the header. `dtype` is torch's or numpy's name of it. Raises InvalidWeightsError if the
    format cannot hold it.
    """
    if name == METADATA_KEY:
        raise refused(name, "has a name that safetensors keeps for itself: rename it")
    if not is_tensor_name(name):
        raise InvalidWeightsError(f"tensor {name[:200]!a} has a name that is {NO_NAME}: rename it", tensor=name)
    if dtype not in DTYPES:
        raise refused(name, f"has dtype {dtype}, which cannot be served: convert it, or leave it out")
    if dtype == "float4_e2m1fn_x2":  # torch counts pairs, the file counts elements
        if not shape:
            raise refused(name, f"is one {dtype} without a dimension to count its elements in: reshape it to (1,)")
        shape = (*shape[:-1], shape[-1] * 2)
    return Entry(name=name, dtype=DTYPES[dtype], shape=shape)


def numpy_source(name: str, array: NDArray[Any]) -> TensorSource:
    """A numpy array as a source. Raises InvalidWeightsError if its dtype cannot be served, or it masks elements."""
    if isinstance(array, np.ma.MaskedArray):
        raise refused(name, "is a masked array, and a file has no mask: pass what filled() returns")

    def read() -> NDArray[np.uint8]:
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        return np.ascontiguousarray(little).reshape(-1).view(np.uint8)

    memory = "numpy", array.__array_interface__["data"][0], array.dtype.str, array.shape, array.strides
    entry = entry_of(name, array.dtype.name, array.shape)
    return TensorSource(entry=entry, read=read, memory=memory if array.size else None)


_GATHER = (
    "gather it on this rank first, e.g. with torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
    "options=StateDictOptions(full_state_dict=True, cpu_offload=True))"
)


def is_tensor(value: object) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_module(value: object) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def is_source(value: object) -> bool:
    """Whether it describes what iterating it yields (`publish.ports.WeightSource`), and is no other weights."""
    if isinstance(value, (Mapping, str, PathLike)) or is_module(value):
        return False
    return hasattr(value, "__iter__") and callable(getattr(value, "metadata", None))


def torch_source(name: str, tensor: Any, casts: Casts) -> TensorSource:
    """A tensor as a source. Raises InvalidWeightsError if it has no bytes of its own to write, or none that can be
    served.
    """
    why = refusal(tensor)
    if why is not None:
        raise refused(name, why)
    own = str(tensor.dtype).removeprefix("torch.")
    dtype = casts.target(name, own)
    is_view = dtype == own and tensor.is_contiguous() and not tensor.is_neg()
    held = TensorRef(tensor)

    def published() -> Any:
        value = held.value.detach()
        return row_major(value if is_view else value.to(getattr(sys.modules["torch"], dtype)).resolve_neg())

    return TensorSource(
        entry=entry_of(name, dtype, tuple(tensor.shape)),
        read=lambda: _read(held, dtype),
        memory=memory_of(tensor),
        place=str(tensor.device) if on_gpu(tensor) else HOST,
        tensor=published,
        is_view=is_view,
        address=tensor.data_ptr() if is_view else 0,
        held=held,
    )


def on_gpu(tensor: Any) -> bool:
    return tensor.device.type == "cuda"


def tied_patterns(module: Any) -> list[str]:
    """Regular expressions for the names that the module declares to be second names of other weights.

    Hugging Face's models declare them in `_tied_weights_keys`, a list or (from transformers 5 on) a mapping; one
    that only has a configuration that says `tie_word_embeddings` ties its head.
    """
    patterns: list[str] = []
    for prefix, part in module.named_modules():
        keys = getattr(part, "_tied_weights_keys", None) or ()
        patterns += [f"{prefix}.{key}" if prefix else key for key in keys]
    if not patterns and getattr(getattr(module, "config", None), "tie_word_embeddings", False) is True:
        patterns = [r"(^|\.)lm_head\.weight$"]
    return patterns


def refusal(tensor: Any) -> str | None:
    torch: Any = sys.modules["torch"]
    kind: Any = tensor.__class__
    if kind.__name__ == "DTensor":
        return f"is a DTensor, of which this rank has a part: {_GATHER}"
    if tensor.device.type == "meta":
        return "is on the meta device and has no values: materialise it first"
    if tensor.is_quantized:
        return "is a torch.quantized tensor: pass its integers and scales as plain tensors, or dequantise it"
    if tensor.is_nested or tensor.layout is not torch.strided:
        return f"has layout {tensor.layout}: make it dense first (to_dense())"
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # its bytes are in other tensors that it wraps
        return f"is a {kind.__module__}.{kind.__name__}, a wrapper around other tensors: pass those"
    return None


def _read(held: TensorRef, dtype: str) -> NDArray[np.uint8]:
    torch: Any = sys.modules["torch"]
    # Each call copies only where it has to.
    here = held.value.detach().to(device="cpu", dtype=getattr(torch, dtype)).resolve_neg()
    return row_major(here).reshape(-1).view(torch.uint8).numpy()


def row_major(tensor: Any) -> Any:
    """The tensor with its elements one after the other, a view where they lie so.

    torch calls a tensor contiguous whatever the stride of a dimension of one element, and refuses its view as bytes for
    that stride.
    """
    tensor, strides, step = tensor.contiguous(), list[int](), 1
    for size in reversed(tensor.shape):
        strides.insert(0, step)
        step *= max(size, 1)
    return tensor if tensor.stride() == tuple(strides) else tensor.as_strided(tensor.shape, strides)


_SMALL_TENSOR = 2**16  # bytes of a tensor from which a call for it alone is worth its while


def joins(one: TensorSource, other: TensorSource) -> bool:
    """Whether `read_together` reads two tensors: small ones of one dtype, whose bytes lie there in host memory."""
    return one.entry.dtype == other.entry.dtype and _is_small(one) and _is_small(other)


def _is_small(source: TensorSource) -> bool:
    torch: Any = sys.modules.get("torch")
    if torch is None or source.held is None or not source.is_view or source.place != HOST:
        return False
    plain = source.held.value.__class__ in {torch.Tensor, torch.nn.Parameter}
    return plain and 0 < source.entry.nbytes <= _SMALL_TENSOR


def read_together(sources: Sequence[TensorSource]) -> NDArray[np.uint8]:
    """The bytes of tensors that join, one after the other, by one call of torch: five calls a tensor take longer."""
    torch: Any = sys.modules["torch"]
    with torch.no_grad():  # parameters as they are, without a detached view of each
        values = [source.held.value.reshape(-1) for source in sources if source.held is not None]
        return torch.cat(values).view(torch.uint8).numpy()


def memory_of(tensor: Any) -> Hashable | None:
    """Equal for tensors with the same bytes, dtype, shape and strides; None for one without bytes."""
    if tensor.numel() == 0:
        return None
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


MadeT = TypeVar("MadeT")


class SameTensors(Generic[MadeT]):
    """Reuses what was made of a state dict for the next step, as long as its tensors are what and where they were.

    Checking hundreds of tensors, cutting them into shards and laying out headers takes as long as comparing them on a
    GPU, while the trainer waits. Comparing `_facts` takes a tenth of it, and the result depends on nothing else.

    The tensors themselves are other objects at each step (`state_dict` makes them), and none is kept between two steps.
    One caller at a time.
    """

    def __init__(self) -> None:
        self._made: MadeT | None = None
        self._facts: Any = None
        self._held: list[TensorRef] = []

    def again(self, state: Mapping[Any, Any], names: Any) -> MadeT | None:
        """What was made of these tensors under these names, if anything. Its sources now read these tensors."""
        if self._made is None or _facts(state, names) != self._facts:
            return None
        for held, value in zip(self._held, state.values(), strict=True):
            held.value = value
        return self._made

    def keep(self, state: Mapping[Any, Any], names: Any, sources: Sequence[TensorSource | None], made: MadeT) -> None:
        """Keep what was made for the next step, if all tensors are plain torch tensors. `names` is what else the result
        depends on, such as how tensors are renamed. There is a source for each tensor, or None.
        """
        self._held = [TensorRef(None) if source is None or source.held is None else source.held for source in sources]
        self._facts = _facts(state, names)
        self._made = None if self._facts is None else made

    def let_go(self) -> None:
        for held in self._held:
            held.value = None


def _facts(state: Mapping[Any, Any], names: Any) -> Any:
    """Equal for state dicts of which the same is made; None for one with anything else than plain torch tensors."""
    torch: Any = sys.modules.get("torch")
    if torch is None or any(type(value) not in {torch.Tensor, torch.nn.Parameter} for value in state.values()):
        return None
    try:
        return names, [
            (name, type(each), each.data_ptr(), each.dtype, each.shape, each.stride(), each.device, each.is_neg())
            for name, each in state.items()
        ]
    except RuntimeError:  # one of a kind that has no address
        return None
