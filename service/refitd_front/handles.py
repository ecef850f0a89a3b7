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
from typing import Any, cast

import msgspec

from refitd_client.tensors import DTYPES
from refitd_client.transport.child import MemoryHandle

MOST_OPCODES = 10_000_000
_SIZE = "torch.Size"
_STORAGES = {"torch.storage.TypedStorage", "torch.storage.UntypedStorage"}
_CLASSES = {"torch.Tensor", "torch.nn.parameter.Parameter"}
_COUNTER = re.compile(rb"/torch_\d+_\d+(_\d+)?")
"""The file of shared memory in which torch counts who has a tensor open."""


class HandlesRefusedError(ValueError):
    """What was sent is no handles. The message is a sentence."""


class Handles(msgspec.Struct, frozen=True):
    """Where tensors lie: a handle of each by the id of the GPU; or one of a buffer that has them side by side."""

    by_gpu: tuple[dict[str, MemoryHandle], ...]
    is_packed: bool


@dataclass(frozen=True, slots=True)
class _Global:
    name: str


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
    return Handles(tuple(map(_by_gpu, cast("list[Any]", listed))), is_packed)


def _by_gpu(found: Any) -> dict[str, MemoryHandle]:
    if not isinstance(found, dict) or not found:
        raise HandlesRefusedError("ipc_handles_pickled has an entry that is no dict of GPU ids")
    return {gpu: _handle(arguments) for gpu, arguments in cast("dict[str, Any]", found).items()}


def _handle(arguments: Any) -> MemoryHandle:
    if not isinstance(arguments, tuple) or len(cast("tuple[Any, ...]", arguments)) != 15:
        raise HandlesRefusedError("a handle has other arguments than torch's rebuild_cuda_tensor")
    given = cast("tuple[Any, ...]", arguments)
    kind, size, stride, offset, storage, dtype, _, handle, nbytes, start, _, counter, place, event, waits = given
    named = dtype.name.removeprefix("torch.") if isinstance(dtype, _Global) else ""
    if kind not in map(_Global, _CLASSES) or storage not in map(_Global, _STORAGES) or named not in DTYPES:
        raise HandlesRefusedError("a handle is of something else than a tensor")
    if not isinstance(counter, bytes) or _COUNTER.fullmatch(counter) is None:
        raise HandlesRefusedError("a handle's counter is none of torch's")
    fields = {"size": size, "stride": stride, "offset": offset, "dtype": named, "handle": handle, "counter": counter}
    more = {"storage_bytes": nbytes, "storage_offset": start, "counter_offset": place, "event": event}
    try:
        return msgspec.convert({**fields, **more, "event_sync": waits}, MemoryHandle, strict=True)
    except msgspec.ValidationError as error:
        raise HandlesRefusedError(f"a handle has a field of another type: {error}") from error


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
            if name in _MADE:
                push(_MADE[name]())
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


_MADE: Mapping[str, Callable[[], Any]] = {
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
