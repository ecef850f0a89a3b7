"""Reuses what was made of a state dict for the next step, as long as its tensors are what and where they were.

Checking hundreds of tensors, cutting them into shards and laying out headers takes as long as comparing them on a GPU,
while the trainer waits; and thousands of new objects make Python collect garbage. Comparing names, types, dtypes,
shapes, strides, devices and addresses takes a tenth of it, and these are all that the result depends on.

The tensors themselves are other objects at each step (`state_dict` makes them), and none is kept between two steps.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from refitd_client.tensors.source import TensorRef, TensorSource

MadeT = TypeVar("MadeT")


@dataclass(frozen=True, slots=True)
class _TensorFacts:
    """All properties of a tensor that the result depends on."""

    kind: type[Any]
    address: int
    dtype: Any
    shape: Any
    stride: tuple[int, ...]
    device: Any
    is_negated: bool

    def hold_for(self, value: Any) -> bool:
        """Whether another tensor has the same properties."""
        try:
            return (
                type(value) is self.kind
                and value.data_ptr() == self.address
                and value.dtype == self.dtype
                and value.shape == self.shape
                and value.stride() == self.stride
                and value.device == self.device
                and value.is_neg() == self.is_negated
            )
        except (AttributeError, RuntimeError):  # no tensor, or one of a kind that has no address
            return False


class SameTensors(Generic[MadeT]):
    """What was made last, and of which tensors. One caller at a time."""

    def __init__(self) -> None:
        self._made: MadeT | None = None
        self._names: tuple[Any, ...] = ()
        self._facts: list[_TensorFacts] = []
        self._held: list[TensorRef] = []

    def again(self, state: Mapping[Any, Any], names: Any) -> MadeT | None:
        """What was made of these tensors under these names, if anything. Its sources now read these tensors."""
        if len(state) != len(self._facts) or (tuple(state), names) != self._names:
            return None
        if not all(facts.hold_for(value) for facts, value in zip(self._facts, state.values(), strict=True)):
            return None
        for held, value in zip(self._held, state.values(), strict=True):
            held.value = value
        return self._made

    def keep(self, state: Mapping[Any, Any], names: Any, sources: Sequence[TensorSource | None], made: MadeT) -> None:
        """Keep a result for the next step, if all tensors are plain torch tensors.

        Args:
            state: the state dict.
            names: what else the result depends on, such as how tensors are renamed.
            sources: a source for each of its tensors, or None.
            made: the result.
        """
        torch: Any = sys.modules.get("torch")
        self._made, self._facts = None, []
        self._held = [TensorRef(None) if source is None or source.held is None else source.held for source in sources]
        if torch is None or any(type(value) not in {torch.Tensor, torch.nn.Parameter} for value in state.values()):
            return
        self._made, self._names = made, (tuple(state), names)
        self._facts = [_facts(value) for value in state.values()]

    def let_go(self) -> None:
        """Keep no tensor alive: the trainer may want its memory."""
        for held in self._held:
            held.value = None


def _facts(value: Any) -> _TensorFacts:
    kind: Any = value.__class__
    address, stride, is_negated = value.data_ptr(), value.stride(), value.is_neg()
    return _TensorFacts(kind, address, value.dtype, value.shape, stride, value.device, is_negated)
