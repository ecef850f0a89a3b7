"""Handles of GPU memory as vLLM's trainers send them: a pickle in base64, which is read and never loaded.

The pickle is of a list of dicts, GPU id to the arguments of torch's `rebuild_cuda_tensor`; or of one such dict. An
interpreter of the few opcodes that such a pickle has makes plain data of it. A global is a name here, and nothing is
imported or called: `torch.Size` of a tuple is that tuple. All else is refused.
"""

import base64
import binascii
import pickletools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, cast

import msgspec

from refitd_client.checkpoint.header import BITS
from refitd_client.contract.decoding import converted
from refitd_client.tensors import DTYPES
from refitd_client.transport.child import MemoryHandle

MOST_OPCODES = 4_000_000
_SIZE = "torch.Size"
_STORAGES = {"torch.storage.TypedStorage", "torch.storage.UntypedStorage"}
_CLASSES = {"torch.Tensor", "torch.nn.parameter.Parameter"}
_COUNTER = re.compile(rb"/torch_\d+_\d+(_\d+)?")
"""The file of shared memory in which torch counts who has a tensor open."""
_COUNTERS = 10_000  # of such a file: CUDA_IPC_REF_COUNTER_FILE_SIZE
_ALLOCATION = re.compile(rb"(?:.?c)?(.{64})", re.DOTALL)
"""A handle of torch's: CUDA's own, after the version and the kind of memory."""
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Counts = Annotated[tuple[_Count, ...], msgspec.Meta(max_length=64)]


class HandlesRefusedError(ValueError):
    """What was sent is no handles. The message is a sentence."""


class Handles(msgspec.Struct, frozen=True):
    """Where tensors lie: a handle of each by the id of the GPU; or one of a buffer that has them side by side.

    `sizes` are their bytes in the buffer, None where there is none.
    """

    by_gpu: tuple[dict[str, MemoryHandle], ...]
    sizes: tuple[int, ...] | None

    @property
    def is_packed(self) -> bool:
        return self.sizes is not None

    def check(self, tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> None:
        """Look whether these tensors, of which each has its name, dtype and shape, lie there.

        Raises:
            HandlesRefusedError: others do.
        """
        if self.sizes is not None:
            sizes = [prod(shape) * BITS[dtype] // 8 for _, dtype, shape in tensors]
            rooms = [prod(each.shape) if each.dtype == "U8" else 0 for each in self.by_gpu[0].values()]
            if list(self.sizes) != sizes or sum(sizes) > min(rooms):
                raise HandlesRefusedError(f"the buffer's {min(rooms)} bytes do not hold the tensors as the call says")
            return
        if len(self.by_gpu) != len(tensors):
            raise HandlesRefusedError(f"{len(tensors)} tensors have {len(self.by_gpu)} handles")
        for (name, *kind), handles in zip(tensors, self.by_gpu, strict=True):
            for each in handles.values():
                if [each.dtype, each.shape] != kind:
                    said = f"tensor {name} is {kind[0]} {kind[1]} in the call"
                    raise HandlesRefusedError(f"{said}, and {each.dtype} {each.shape} in the trainer's memory")


@dataclass(frozen=True, slots=True)
class _Global:
    name: str


class _Arguments(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The arguments of `rebuild_cuda_tensor` without its classes. A tensor without bytes has no handles."""

    size: _Counts
    stride: _Counts
    offset: _Count
    device: int
    handle: bytes | None
    storage_bytes: _Count
    storage_offset: _Count
    needs_gradient: bool
    counter: bytes | None
    place: Annotated[int, msgspec.Meta(ge=0, lt=_COUNTERS)] | None
    event: Annotated[bytes, msgspec.Meta(max_length=64)] | None
    waits: bool | None

    @property
    def counted(self) -> tuple[str, int]:
        """Where torch counts.

        Raises:
            HandlesRefusedError: torch does not count there.
        """
        if self.counter is not None and _COUNTER.fullmatch(self.counter) is None:
            raise HandlesRefusedError("a handle's counter is none of torch's")
        return (self.counter or b"").decode(), self.place or 0


def read_handles(text: str, sizes: Sequence[int] | None) -> Handles:
    """Read handles.

    Args:
        text: the pickle in base64.
        sizes: bytes of each tensor in the buffer; None where each has a handle.

    Raises:
        HandlesRefusedError: it is none.
    """
    try:
        found = _Reading().read(base64.b64decode(text, validate=True))
    except (binascii.Error, IndexError, KeyError, AttributeError, TypeError, OverflowError) as error:
        raise HandlesRefusedError(f"ipc_handles_pickled is no pickle of handles: {error!r}") from error
    except HandlesRefusedError:
        raise
    except ValueError as error:  # of pickletools
        raise HandlesRefusedError(f"ipc_handles_pickled is no pickle of handles: {error}") from error
    is_packed = isinstance(found, dict)
    listed: Any = [found] if is_packed else found
    if not isinstance(listed, list) or not listed or (sizes is not None) is not is_packed:
        raise HandlesRefusedError("ipc_handles_pickled is no list of handles, nor one buffer's with tensor_sizes")
    packed = None if sizes is None else tuple(sizes)
    return Handles(tuple(map(_by_gpu, cast("list[Any]", listed))), packed)


def _by_gpu(found: Any) -> dict[str, MemoryHandle]:
    if not isinstance(found, dict) or not found:
        raise HandlesRefusedError("ipc_handles_pickled has an entry that is no dict of GPU ids")
    named = cast("dict[str, Any]", found).items()
    return {f"GPU-{gpu.removeprefix('GPU-')}": _handle(arguments) for gpu, arguments in named}


def _handle(arguments: Any) -> MemoryHandle:
    if not isinstance(arguments, tuple) or len(cast("tuple[Any, ...]", arguments)) != 15:
        raise HandlesRefusedError("a handle has other arguments than torch's rebuild_cuda_tensor")
    kind, *given = cast("tuple[Any, ...]", arguments)
    dtype = DTYPES.get(given[4].name.removeprefix("torch.")) if isinstance(given[4], _Global) else None
    if kind not in map(_Global, _CLASSES) or given[3] not in map(_Global, _STORAGES) or dtype is None:
        raise HandlesRefusedError("a handle is of something else than a tensor")
    try:
        it = converted([*given[:3], *given[5:]], _Arguments)
    except msgspec.ValidationError as error:
        raise HandlesRefusedError(f"a handle has an argument that is none of torch's: {error}") from error
    begin, nbytes = (count * BITS.get(dtype, 0) // 8 for count in (it.offset, prod(it.size)))
    if not nbytes:
        return MemoryHandle(dtype=dtype, shape=it.size, handle=b"", offset=0, counter=it.counted, event=b"")
    steps = [prod(it.size[at + 1 :]) if size > 1 else None for at, size in enumerate(it.size)]
    if len(it.stride) != len(steps) or any(step not in {None, it.stride[at]} for at, step in enumerate(steps)):
        raise HandlesRefusedError(f"a handle is of a tensor of shape {list(it.size)} that is not contiguous")
    if begin + nbytes > it.storage_bytes:
        raise HandlesRefusedError(f"a handle is of a tensor that ends beyond its storage of {it.storage_bytes} bytes")
    allocation = _ALLOCATION.fullmatch(it.handle or b"")
    if allocation is None:
        raise HandlesRefusedError(
            "a tensor's memory has no handle that another program can open: torch's expandable segments have none "
            "(PYTORCH_CUDA_ALLOC_CONF), so have the trainer leave them off, or update by disk or nccl"
        )
    return MemoryHandle(
        dtype=dtype, shape=it.size, handle=allocation[1], offset=it.storage_offset + begin, counter=it.counted,
        event=(it.event or b"") if it.waits else b"",
    )  # fmt: skip


class _Reading:
    """Carries out a pickle, as far as it makes plain data."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[Any, Any] = {}

    def read(self, pickled: bytes) -> Any:
        push, memo = self._stack.append, self._memo
        for count, (opcode, arg, _) in enumerate(pickletools.genops(pickled)):
            if count > MOST_OPCODES:
                raise HandlesRefusedError("ipc_handles_pickled has too many opcodes")
            name = opcode.name
            if name == "STOP":
                return self._stack[-1]
            if name in _NEW_VALUES:
                push(_NEW_VALUES[name]())
            elif name in _GIVEN:
                push(arg)
            elif name in {"BINGET", "LONG_BINGET"}:
                push(memo[arg])
            elif name in {"MEMOIZE", "BINPUT", "LONG_BINPUT"}:
                memo[len(memo) if name == "MEMOIZE" else arg] = self._stack[-1]
            elif (build := _BUILDS.get(name)) is not None:
                build(self, arg)
            elif name not in {"PROTO", "FRAME"}:
                raise HandlesRefusedError(f"ipc_handles_pickled has the opcode {name}, which no pickle of handles has")
        raise HandlesRefusedError("ipc_handles_pickled has no end")

    def mark(self, _: object) -> None:
        self._marks.append(len(self._stack))

    def tuple_of(self, _: object) -> None:
        self._stack.append(tuple(self._popped(len(self._stack) - self._marks.pop())))

    def short_tuple(self, size: int) -> None:
        self._stack.append(tuple(self._popped(size)))

    def append(self, size: int | None) -> None:
        items = self._popped(size or len(self._stack) - self._marks.pop())
        self._open(list).extend(items)

    def put(self, size: int | None) -> None:
        items = self._popped(size or len(self._stack) - self._marks.pop())
        if not all(type(key) is str for key in items[::2]):  # to hash nested tuples takes as long as a sender likes
            raise HandlesRefusedError("ipc_handles_pickled has a dict with a key that is no text")
        self._open(dict).update(zip(items[::2], items[1::2], strict=True))

    def name(self, arg: object) -> None:
        module, name = str(arg).split(" ", 1) if arg is not None else self._popped(2)
        named = f"{module}.{name}" if type(module) is type(name) is str else "something"
        if named != _SIZE and named not in _CLASSES | _STORAGES and named.removeprefix("torch.") not in DTYPES:
            raise HandlesRefusedError(f"ipc_handles_pickled names {named}, which no handle has")
        self._stack.append(_Global(named))

    def call(self, _: object) -> None:
        called, arguments = self._popped(2)
        if type(called) is not _Global or called.name != _SIZE or type(arguments) is not tuple:
            raise HandlesRefusedError(f"ipc_handles_pickled calls {called if type(called) is _Global else 'something'}")
        (size,) = cast("tuple[Any, ...]", arguments)
        self._stack.append(tuple(size))

    def _popped(self, size: int) -> list[Any]:
        if not 0 <= size <= len(self._stack):
            raise IndexError("the stack is empty")
        items = self._stack[len(self._stack) - size :]
        del self._stack[len(self._stack) - size :]
        return items

    def _open(self, kind: type[Any]) -> Any:
        if type(self._stack[-1]) is not kind:
            raise HandlesRefusedError("ipc_handles_pickled is built in another way than a pickle of handles")
        return self._stack[-1]


_NEW_VALUES: Mapping[str, Callable[[], Any]] = {
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
}
_GIVEN = frozenset(
    ("BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINBYTES", "BINBYTES", "SHORT_BINUNICODE", "BINUNICODE")
)
_BUILDS: Mapping[str, Callable[[_Reading, Any], None]] = {
    "MARK": _Reading.mark,
    "TUPLE": _Reading.tuple_of,
    "TUPLE1": lambda reading, _: reading.short_tuple(1),
    "TUPLE2": lambda reading, _: reading.short_tuple(2),
    "TUPLE3": lambda reading, _: reading.short_tuple(3),
    "APPEND": lambda reading, _: reading.append(1),
    "APPENDS": _Reading.append,
    "SETITEM": lambda reading, _: reading.put(2),
    "SETITEMS": _Reading.put,
    "GLOBAL": _Reading.name,
    "STACK_GLOBAL": _Reading.name,
    "REDUCE": _Reading.call,
}
