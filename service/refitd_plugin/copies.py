"""A copy that a loader was seen to make, and what copies account for."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from refitd_plugin.spans import Covered, Span, stretches

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
