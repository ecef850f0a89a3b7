"""Watches one load: which bytes of the checkpoint went where in the model, and what was not a plain copy.

While `model.load_weights` runs, torch's dispatcher shows every operation. A `copy_` whose source lies in the memory
of the checkpoint and whose destination lies in the model's is a copy that can be repeated. Everything else that happens
to a tensor of the checkpoint (a sum, a cast, `.item()`) makes it one that has to go through the loader each time. So
does reading it again in the model: something is derived from it, which a copy would leave stale. Where threads are
started nothing is repeated, since the dispatcher shows only what its own thread does.

On a GPU a loader may move a tensor to the device before it copies it; such a tensor is followed as the same one.
"""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from refitd_sglang.spans import Covered, Named, Span, TooManyStretchesError, stretches

_MOVES = {"aten::_to_copy", "aten::clone", "aten::_pin_memory", "aten::pin_memory"}
_FILLS = {"aten::fill_", "aten::zero_"}
_ONE_AT_A_TIME = threading.Lock()  # functions of the standard library are exchanged meanwhile


@dataclass(frozen=True, slots=True)
class Copy:
    """One plain copy, of what has `shape` and `strides` and begins at `offset` (both in elements) of tensor `name`."""

    name: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    target: torch.Tensor

    @property
    def begin(self) -> int:
        """The address of the first byte that it writes."""
        return self.target.data_ptr()

    @property
    def end(self) -> int:
        """The address behind the last byte that it writes."""
        steps = ((size - 1) * stride for size, stride in zip(self.target.shape, self.target.stride(), strict=True))
        return self.begin + (sum(steps) + 1) * self.target.element_size()

    def source(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """What to copy, as a view of a checkpoint's tensor."""
        tensor = tensors[self.name]
        return tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.offset)


class Recorder(TorchDispatchMode):
    """Use it as a context around a load. Afterwards: `copies` in their order, `computing` (names of tensors that are
    not only copied), `written` (stretches of the model that are no copies), and `whole`: why nothing can be repeated.
    """

    def __init__(self, checkpoint: Mapping[str, torch.Tensor], model: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.copies: list[Copy] = []
        self.computing: set[str] = set()
        self.written: list[Span] = []
        self.whole: str | None = None
        self._dtypes = {name: tensor.dtype for name, tensor in checkpoint.items()}
        self._checkpoint = Named(_span(tensor, name) for name, tensor in checkpoint.items())
        self._model = Covered(_storage(tensor) for tensor in model)
        self._moved: dict[int, tuple[StorageWeakRef, str, int]] = {}
        self._threads = _Threads(self)

    def __enter__(self) -> "Recorder":
        self._threads.begin()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._threads.end()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        try:
            self._see(func, args, kwargs, result)
        except Exception as error:  # the load goes on: that it cannot be repeated is no fault of it
            self.give_up(f"{func} could not be followed: {type(error).__name__}: {error}")
        return result

    def give_up(self, reason: str) -> None:
        """Nothing of this load can be repeated. The first reason stays."""
        self.whole = self.whole or reason

    def _see(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        schema = func._schema  # noqa: SLF001 - what a torch operator is and does is nowhere else
        if schema.name == "aten::copy_":
            self._copy(args[0], args[1])
            return
        if _is_view(schema):
            return
        if schema.name in _MOVES and self._move(args[0], result):
            return
        for argument, value in _arguments(schema, args, kwargs):
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(value):
                self._touched(schema.name, tensor, is_write=is_write)

    def _touched(self, name: str, tensor: torch.Tensor, *, is_write: bool) -> None:
        if (found := self._origin(tensor)) is not None:
            self.computing.add(found[0])
        elif self._is_model(tensor):
            if not (is_write and name in _FILLS):
                self._read(tensor)
            if is_write:
                self._wrote(tensor)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        origin = self._origin(source)
        if not self._is_model(target):
            self.computing |= {each[0] for each in (origin, self._origin(target)) if each is not None}
            if self._is_model(source):
                self._read(source)
        elif origin is not None and self._is_plain(origin[0], target, source):
            name, offset = origin
            self.copies.append(Copy(name, offset, tuple(source.shape), source.stride(), target.detach()))
        else:
            if origin is not None:
                self.computing.add(origin[0])
            elif self._is_model(source):
                self._read(source)
            self._wrote(target)

    def _wrote(self, tensor: torch.Tensor) -> None:
        self.written += stretches(*_layout(tensor))

    def _read(self, tensor: torch.Tensor) -> None:
        """Something is derived from weights: what they came from goes through the loader each time, to derive it again.

        Where they did not come from this load, nobody can say what else would have to be done again.
        """
        read = Covered(stretches(*_layout(tensor)))
        begin, end = read.spans[0][0], read.spans[-1][1]
        sources = [copy for copy in self.copies if copy.begin < end and begin < copy.end]
        known = Covered([*self.written, *(span for copy in sources for span in stretches(*_layout(copy.target)))])
        if read.without(known):
            self.give_up("the loader reads weights that it has not loaded")
        self.computing |= {copy.name for copy in sources}

    def _is_plain(self, name: str, target: torch.Tensor, source: torch.Tensor) -> bool:
        same = target.dtype == source.dtype == self._dtypes[name] and target.shape == source.shape
        return same and not (source.is_neg() or source.is_conj())

    def _move(self, source: torch.Tensor, result: Any) -> bool:
        """Whether a tensor of the checkpoint got a twin, bit for bit: then the twin stands for it."""
        origin = self._origin(source)
        plain = isinstance(result, torch.Tensor) and result.dtype == source.dtype
        if origin is None or not plain or not (source.is_contiguous() and result.is_contiguous()):
            return False
        storage = result.untyped_storage()
        self._moved[storage.data_ptr()] = (StorageWeakRef(storage), origin[0], origin[1] - int(result.storage_offset()))
        return True

    def _origin(self, tensor: torch.Tensor) -> tuple[str, int] | None:
        """Which tensor of the checkpoint this one is a view of, and from which of its elements on."""
        if tensor.numel() == 0:
            return None
        moved = self._moved.get(tensor.untyped_storage().data_ptr())
        if moved is not None and not moved[0].expired():
            return moved[1], moved[2] + int(tensor.storage_offset())
        found = self._checkpoint.at(tensor.data_ptr()) if tensor.device.type == "cpu" else None
        if found is None:
            return None
        return found[0], (tensor.data_ptr() - found[1]) // tensor.element_size()

    def _is_model(self, tensor: torch.Tensor) -> bool:
        return self._model.touches(*_storage(tensor))


class _Threads:
    """Notices threads that the recorder's own thread starts or gives work to."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._undo: list[Any] = []

    def begin(self) -> None:
        from concurrent.futures import ThreadPoolExecutor

        _ONE_AT_A_TIME.acquire()
        self._watch(threading.Thread, "start")
        self._watch(ThreadPoolExecutor, "submit")

    def end(self) -> None:
        while self._undo:
            self._undo.pop()()
        _ONE_AT_A_TIME.release()

    def _watch(self, kind: type, name: str) -> None:
        original, recorder, mine = getattr(kind, name), self._recorder, threading.get_ident()

        def watched(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == mine:
                recorder.give_up("the loader works in threads")
            return original(*args, **kwargs)

        setattr(kind, name, watched)
        self._undo.append(lambda: setattr(kind, name, original))


def unaccounted(recorder: Recorder, tensors: Iterable[torch.Tensor]) -> int:
    """How many bytes of these tensors the load was not seen to write."""
    try:
        seen = [span for copy in recorder.copies for span in stretches(*_layout(copy.target))]
        wanted = Covered(span for tensor in tensors for span in stretches(*_layout(tensor)))
    except TooManyStretchesError:
        recorder.give_up("a tensor lies in too many pieces")
        return 0
    return wanted.without(Covered([*seen, *recorder.written]))


def overlapping(recorder: Recorder, copies: Iterable[Copy]) -> bool:
    """Whether anything but these copies writes where they do: then their order would matter."""
    others = [copy for copy in recorder.copies if copy.name in recorder.computing]
    computed = Covered([*recorder.written, *(span for copy in others for span in stretches(*_layout(copy.target)))])
    return any(computed.touches(*span) for copy in copies for span in stretches(*_layout(copy.target)))


def _layout(tensor: torch.Tensor) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    return tensor.data_ptr(), tensor.element_size(), tuple(tensor.shape), tensor.stride()


def _span(tensor: torch.Tensor, name: str) -> tuple[int, int, str]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size(), name


def _storage(tensor: torch.Tensor) -> Span:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _is_view(schema: Any) -> bool:
    """It gives another view of its argument, and neither reads nor writes."""
    returned = [each.alias_info for each in schema.returns]
    return bool(returned) and all(info is not None and not info.is_write for info in returned)


def _arguments(schema: Any, args: Any, kwargs: Any) -> Iterable[tuple[Any, Any]]:
    yield from zip(schema.arguments, args, strict=False)
    by_name = {argument.name: argument for argument in schema.arguments}
    yield from ((by_name[name], value) for name, value in kwargs.items() if name in by_name)


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
