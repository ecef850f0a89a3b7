"""Watches one load: which bytes of the checkpoint went where in the model, and what was not a plain copy.

While `model.load_weights` runs, torch's dispatcher shows every operation. A `copy_` whose source lies in the memory
of the checkpoint and whose destination lies in the model's is a copy that can be repeated. Everything else that happens
to a tensor of the checkpoint (a sum, a cast, `.item()`) makes it one that has to go through the loader each time. So
does reading it again in the model: something is derived from it, which a copy would leave stale. Where threads are
started nothing is repeated, since the dispatcher shows only what its own thread does.

On a GPU a loader may move a tensor to the device before it copies it; such a tensor is followed as the same one.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from refitd_plugin.copies import OldContents, PlanCopy, copies_into, is_onto_itself, layout_of
from refitd_plugin.spans import Covered, NamedSpans, Span, stretches

_ONE_AT_A_TIME = threading.Lock()  # functions of the standard library are exchanged meanwhile
_MOVES = {"aten::_to_copy", "aten::clone", "aten::_pin_memory", "aten::pin_memory"}
_FILLS = {"aten::fill_", "aten::zero_"}
_READS_OLD = "the loader reads weights that it has not loaded"


class ThreadWatch:
    """Calls `report` when the thread that began the watch starts another thread, or gives work to one."""

    def __init__(self, report: Callable[[], None]) -> None:
        self._report = report
        self._undo: list[Any] = []

    def begin(self) -> None:
        """Begin to watch."""
        from concurrent.futures import ThreadPoolExecutor

        _ONE_AT_A_TIME.acquire()
        self._watch(threading.Thread, "start")
        self._watch(ThreadPoolExecutor, "submit")

    def end(self) -> None:
        """End to watch."""
        while self._undo:
            self._undo.pop()()
        _ONE_AT_A_TIME.release()

    def _watch(self, kind: type, name: str) -> None:
        original, report, mine = getattr(kind, name), self._report, threading.get_ident()

        def watched(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == mine:
                report()
            return original(*args, **kwargs)

        setattr(kind, name, watched)
        self._undo.append(lambda: setattr(kind, name, original))


class Recorder(TorchDispatchMode):
    """Use it as a context around a load. Afterwards: `copies` in their order, `computing` (names of tensors that are
    not only copied), `written` (stretches of the model that are no copies), and `loader_only`: why nothing can be
    repeated, None where the copies can.
    """

    def __init__(self, checkpoint: Mapping[str, torch.Tensor], model: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.copies: list[PlanCopy] = []
        self.computing: set[str] = set()
        self.written: list[Span] = []
        self.loader_only: str | None = None
        self._dtypes = {name: tensor.dtype for name, tensor in checkpoint.items()}
        self._checkpoint = NamedSpans(
            (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size(), name)
            for name, tensor in checkpoint.items()
        )
        self._model = Covered(_storage(tensor) for tensor in model)
        self._moved: dict[int, tuple[StorageWeakRef, str, int]] = {}
        self._old = OldContents(self.copies, self.written, self.computing)
        self._threads = ThreadWatch(lambda: self.give_up("the loader works in threads"))

    def __enter__(self) -> "Recorder":
        self._threads.begin()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._threads.end()
        super().__exit__(*error)
        if self._old.stays:
            self.give_up(_READS_OLD)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        try:
            self._see(func, args, kwargs, result)
        except Exception as error:  # the load goes on: it is only not repeatable
            self.give_up(f"{func} could not be followed: {type(error).__name__}: {error}")
        return result

    def give_up(self, reason: str) -> None:
        """Record that nothing of this load can be repeated. The first reason stays."""
        self.loader_only = self.loader_only or reason

    def _see(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        schema = func._schema  # noqa: SLF001 - what a torch operator is and does is nowhere else
        if schema.name == "aten::copy_" and isinstance(args[1], torch.Tensor):
            self._copy(args[0], args[1])
            return
        if schema.name == "aten::copy_":  # of a number
            self._touched("aten::fill_", args[0], is_write=True)
            return
        returned = [each.alias_info for each in schema.returns]
        if returned and all(info is not None and not info.is_write for info in returned):
            return  # another view of its argument: nothing is read or written
        if schema.name in _MOVES and self._move(args[0], result):
            return
        for argument, value in _arguments(schema, args, kwargs):
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(value):
                self._touched(schema.name, tensor, is_write=is_write)

    def _touched(self, name: str, tensor: torch.Tensor, *, is_write: bool) -> None:
        if (found := self._origin(tensor)) is not None:
            self.computing.add(found[0])
        elif self._old.is_twin(tensor):
            if is_write or not self._old.may_read(tensor):
                self.give_up(_READS_OLD)
        elif self._is_model(tensor):
            if not (is_write and name in _FILLS):
                self._read(tensor, is_written=is_write)
            if is_write:
                self._wrote(tensor)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if is_onto_itself(target, source) or self._old.is_moved_back(target, source):
            return
        origin = self._origin(source)
        if not self._is_model(target):
            self._touched("aten::copy_", target, is_write=True)
            self._touched("aten::copy_", source, is_write=False)
        elif origin is not None and self._is_plain(origin[0], target, source):
            name, offset = origin
            self.copies.append(PlanCopy(name, offset, tuple(source.shape), source.stride(), target.detach()))
        elif self._old.is_twin(source) or (origin is None and self._is_model(source) and self._old.is_in(source)):
            self._old.copied_to(target)
        else:
            self._touched("aten::copy_", source, is_write=False)
            self._wrote(target)

    def _wrote(self, tensor: torch.Tensor) -> None:
        self.written += stretches(*layout_of(tensor))

    def _read(self, tensor: torch.Tensor, *, is_written: bool) -> None:
        """Something is derived from weights: what they came from goes through the loader each time, to derive it again.

        Where they did not come from this load, nothing says what else would have to be done again.
        """
        if self._old.is_in(tensor) and (is_written or not self._old.may_read(tensor)):
            self.give_up(_READS_OLD)
        read = Covered(stretches(*layout_of(tensor)))
        self.computing |= {copy.name for copy in copies_into(read, self.copies)}

    def _is_plain(self, name: str, target: torch.Tensor, source: torch.Tensor) -> bool:
        same = target.dtype == source.dtype == self._dtypes[name] and target.shape == source.shape
        return same and not (source.is_neg() or source.is_conj())

    def _move(self, source: torch.Tensor, result: Any) -> bool:
        """Whether a tensor of the checkpoint, or old contents, got a twin, bit for bit, which stands for it."""
        origin = self._origin(source)
        plain = isinstance(result, torch.Tensor) and result.dtype == source.dtype
        if plain and self._is_model(source) and self._old.is_in(source):
            self._old.moved(source, result)
            return True
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


def _storage(tensor: torch.Tensor) -> Span:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


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
