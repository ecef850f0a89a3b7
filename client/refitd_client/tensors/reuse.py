"""What was made of a state dict: used again for the next step, as long as its tensors are what and where they were.

To look at hundreds of tensors, to cut them into shards and to lay out headers takes as long as to compare them on a
GPU, while the trainer waits; and thousands of new objects have Python collect garbage. To see that nothing is different
takes a tenth of it: names, types, dtypes, shapes, strides, devices and addresses are all that was made use of.

The tensors themselves are other objects at each step (`state_dict` makes them), and none is kept between two steps.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from refitd_client.tensors.source import Held, TensorSource

MadeT = TypeVar("MadeT")


@dataclass(frozen=True, slots=True)
class _Fact:
    """All that was asked of a tensor."""

    kind: type[Any]
    address: int
    dtype: Any
    shape: Any
    stride: tuple[int, ...]
    device: Any
    is_negated: bool

    def is_true_of(self, value: Any) -> bool:
        """Whether another tensor would have given the same answers."""
        return (
            type(value) is self.kind
            and value.data_ptr() == self.address
            and value.dtype == self.dtype
            and value.shape == self.shape
            and value.stride() == self.stride
            and value.device == self.device
            and value.is_neg() == self.is_negated
        )


class SameTensors(Generic[MadeT]):
    """What was made last, and of which tensors. One caller at a time."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._made: MadeT | None = None
        self._names: tuple[Any, ...] = ()
        self._facts: list[_Fact] = []
        self._held: list[Held] = []

    def again(self, state: Mapping[Any, Any], names: Any) -> MadeT | None:
        """What was made of these tensors under these names. Its sources read the tensors that are here now."""
        if len(state) != len(self._facts) or (tuple(state), names) != self._names or not self._are(state.values()):
            return None
        for held, value in zip(self._held, state.values(), strict=True):
            held.value = value
        return self._made

    def keep(self, state: Mapping[Any, Any], names: Any, sources: Sequence[TensorSource | None], made: MadeT) -> None:
        """Something was made of a state dict: of a source for each of its tensors, or none. Of plain tensors alone."""
        self._made, self._facts, self._held = None, [], [_held(source) for source in sources]
        if all(_is_plain(value) for value in state.values()):
            self._made, self._names = made, (tuple(state), names)
            self._facts = [_fact(value) for value in state.values()]

    def let_go(self) -> None:
        """Keep no tensor alive: the trainer may want its memory."""
        for held in self._held:
            held.value = None

    def _are(self, values: Iterable[Any]) -> bool:
        try:
            return all(fact.is_true_of(value) for fact, value in zip(self._facts, values, strict=True))
        except (AttributeError, RuntimeError):  # no tensor, or one of a kind that has no address
            return False


def _held(source: TensorSource | None) -> Held:
    return Held(None) if source is None or source.held is None else source.held


def _is_plain(value: Any) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and type(value) in {torch.Tensor, torch.nn.Parameter}


def _fact(value: Any) -> _Fact:
    kind: Any = value.__class__
    address, stride, is_negated = value.data_ptr(), value.stride(), value.is_neg()
    return _Fact(kind, address, value.dtype, value.shape, stride, value.device, is_negated)
