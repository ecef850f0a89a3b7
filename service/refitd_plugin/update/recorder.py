"""Watches one load: which bytes of the checkpoint went where in the model, and what was not a plain copy.

While `model.load_weights` runs, torch's dispatcher shows every operation. A `copy_` whose source lies in the memory
of the checkpoint and whose destination lies in the model's is a copy that can be repeated. Everything else that happens
to a tensor of the checkpoint (a sum, a cast, `.item()`) makes it one that has to go through the loader each time. So
does reading it again in the model: something is derived from it, which a copy would leave stale. Where threads are
started nothing is repeated, since the dispatcher shows only what its own thread does.

On a GPU a loader may move a tensor to the device before it copies it; such a tensor is followed as the same one.

A load may copy contents that the model held before it. SGLang stages the tensors of a module on the device around its
hooks, and copies them back when the hook has ended: after a load since 0.5.19, and before it as well since 0.5.22. On a
GPU that copies each tensor onto itself, since the tensor is on "cuda:0" and the hook's device is "cuda". Weights that
are offloaded go to the GPU and back. On the CPU SGLang leaves it out.

Such copies change nothing that a load leaves behind, if

    a tensor is copied onto itself;
    a tensor is moved, and its twin is copied back while nothing was written to either; or
    plain copies from the checkpoint overwrite all of the place later, and nothing reads it before.

A few bytes may also be read, if the load leaves them as they were and no checkpoint writes to them: then what comes of
them is the same after each load. The scales of SGLang's KV cache are such (Qwen2 in fp8): its hook reads them after
each load, also where no checkpoint has any.

Everything else that is done with old contents makes the result depend on them. Then no copies can stand for the load.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from refitd_plugin.memory.spans import Covered, NamedSpans, Span, TooManyStretchesError, stretches

_FEW = 16  # bytes of a tensor that may be read: a scale
Layout = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""Address, size of an element, shape and strides: what `stretches` takes."""


@dataclass(frozen=True, slots=True)
class PlanCopy:
    """One plain copy, of what has `shape` and `strides` and begins at `offset` (both in elements) of tensor `name`."""

    name: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    target: torch.Tensor

    @property
    def begin(self) -> int:
        return self.target.data_ptr()

    @property
    def end(self) -> int:
        steps = ((size - 1) * stride for size, stride in zip(self.target.shape, self.target.stride(), strict=True))
        return self.begin + (sum(steps) + 1) * self.target.element_size()

    def source(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """What to copy, as a view of a checkpoint's tensor."""
        tensor = tensors[self.name]
        return tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.offset)


def layout_of(tensor: torch.Tensor) -> Layout:
    return tensor.data_ptr(), tensor.element_size(), tuple(tensor.shape), tensor.stride()


def spans_of(copies: Iterable[PlanCopy]) -> list[Span]:
    return [span for copy in copies for span in stretches(*layout_of(copy.target))]


def unaccounted(written: Iterable[Span], tensors: Iterable[torch.Tensor]) -> int:
    """How many bytes of these tensors are not in the stretches that a load was seen to write.

    Raises:
        TooManyStretchesError: one lies in too many pieces.
    """
    wanted = Covered(span for tensor in tensors for span in stretches(*layout_of(tensor)))
    return wanted.without(Covered(written))


@dataclass(frozen=True, slots=True)
class _Twin:
    """A tensor with the contents of one of the model's, which is `source`, and how much was written before."""

    storage: StorageWeakRef
    layout: Layout
    source: torch.Tensor
    copies: int
    written: int


@dataclass(frozen=True, slots=True)
class _Stale:
    """A place in the model that old contents were copied to, and how many plain copies were made before."""

    place: Covered
    copies: int


class OldContents:
    """Old contents during one load. The arguments are the recorder's own lists, which grow while the load goes on."""

    def __init__(self, copies: Sequence[PlanCopy], written: Sequence[Span], computing: AbstractSet[str]) -> None:
        self._copies, self._written, self._computing = copies, written, computing
        self._twins: dict[int, _Twin] = {}
        self._stale: list[_Stale] = []
        self._constants: list[tuple[torch.Tensor, torch.Tensor]] = []

    def is_in(self, tensor: torch.Tensor) -> bool:
        """Whether some bytes of one of the model's tensors are not from this load."""
        place = _covered(tensor)
        known = Covered([*self._written, *spans_of(copies_into(place, self._copies))])
        return place.without(known) > 0 or any(each.place.meets(place) and self._stays(each) for each in self._stale)

    def moved(self, source: torch.Tensor, twin: torch.Tensor) -> None:
        """Note that old contents of one of the model's tensors were moved, bit for bit."""
        storage = twin.untyped_storage()
        written = len(self._copies), len(self._written)
        self._twins[storage.data_ptr()] = _Twin(StorageWeakRef(storage), layout_of(twin), source.detach(), *written)

    def is_twin(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in memory that old contents were moved to."""
        return self._twin(tensor) is not None

    def is_moved_back(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Whether a copy puts back what was moved, and finds what it puts there."""
        twin = self._twin(source)
        if twin is None or (twin.layout, layout_of(twin.source)) != (layout_of(source), layout_of(target)):
            return False
        place = _covered(target)
        since = Covered([*self._written[twin.written :], *spans_of(copies_into(place, self._copies[twin.copies :]))])
        return not since.meets(place)

    def copied_to(self, target: torch.Tensor) -> None:
        """Note that old contents were copied to another place in the model."""
        self._stale.append(_Stale(_covered(target), len(self._copies)))

    def may_read(self, tensor: torch.Tensor) -> bool:
        """Whether old contents that are read, or a twin of them, may be constant. `stays` says whether they were."""
        twin = self._twin(tensor)
        place = tensor.detach() if twin is None else twin.source
        if place.numel() * place.element_size() > _FEW or (twin is not None and twin.layout != layout_of(tensor)):
            return False
        self._constants.append((place, _bytes_of(tensor)))
        return True

    @property
    def stays(self) -> bool:
        """Whether old contents are left in a place that they were copied to, as far as that can be followed; or were
        read, and are no constants.
        """
        try:
            return any(self._stays(each) for each in self._stale) or not all(map(self._is_constant, self._constants))
        except TooManyStretchesError:
            return True

    def _is_constant(self, seen: tuple[torch.Tensor, torch.Tensor]) -> bool:
        place, contents = seen
        covered = _covered(place)
        is_loaded = any(covered.touches(*span) for span in spans_of(copies_into(covered, self._copies)))
        return not is_loaded and torch.equal(_bytes_of(place), contents)

    def _stays(self, stale: _Stale) -> bool:
        later = [copy for copy in self._copies[stale.copies :] if copy.name not in self._computing]
        return stale.place.without(Covered(spans_of(copies_into(stale.place, later)))) > 0

    def _twin(self, tensor: torch.Tensor) -> _Twin | None:
        found = self._twins.get(tensor.untyped_storage().data_ptr())
        return None if found is None or found.storage.expired() else found


def is_onto_itself(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a copy from one tensor to another changes no byte, since they are the same elements in the same place."""
    return (
        (target.device, target.dtype, layout_of(target)) == (source.device, source.dtype, layout_of(source))
        and target.is_neg() == source.is_neg()
        and target.is_conj() == source.is_conj()
    )


def copies_into(place: Covered, copies: Sequence[PlanCopy]) -> list[PlanCopy]:
    """The copies that may write between the first and the last byte of a place."""
    if not place.spans:
        return []
    begin, end = place.spans[0][0], place.spans[-1][1]
    return [copy for copy in copies if copy.begin < end and begin < copy.end]


def _covered(tensor: torch.Tensor) -> Covered:
    return Covered(stretches(*layout_of(tensor)))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).cpu().reshape(-1).view(torch.uint8)


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
        from concurrent.futures import ThreadPoolExecutor

        _ONE_AT_A_TIME.acquire()
        self._watch(threading.Thread, "start")
        self._watch(ThreadPoolExecutor, "submit")

    def end(self) -> None:
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
