"""The copies that a loader was seen to make, and the old contents that a load reads or copies.

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

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from refitd_plugin.spans import Covered, Span, TooManyStretchesError, stretches

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


def layout_of(tensor: torch.Tensor) -> Layout:
    """Where a tensor lies."""
    return tensor.data_ptr(), tensor.element_size(), tuple(tensor.shape), tensor.stride()


def spans_of(copies: Iterable[PlanCopy]) -> list[Span]:
    """The stretches that copies write."""
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
    """Old contents during one load. The arguments are the recorder's own, and grow while the load goes on.

    Args:
        copies: The plain copies so far, in their order.
        written: The stretches of the model that were written otherwise.
        computing: The names of the tensors that are not only copied.
    """

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
        """Old contents of one of the model's tensors were moved, bit for bit."""
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
        """Old contents were copied to another place in the model."""
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
