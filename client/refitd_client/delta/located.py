# pyright: basic
"""Where tensors lie on their device. Lists of addresses are made once, and hold for as long as tensors stay there."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from refitd_client.checkpoint.finite import rule_of
from refitd_client.delta.change import elements_of
from refitd_client.fingerprint import twin, width_of
from refitd_client.fingerprint.rows import Part
from refitd_client.tensors.source import TensorSource

_BATCH = 2**28  # bytes of casts' results that are there at a time

MadeT = TypeVar("MadeT")


@dataclass(frozen=True, slots=True)
class Located:
    """A tensor by number, and the address of its bits. `made` are the bits if they were made for it, kept alive."""

    number: int
    source: TensorSource
    address: int
    made: Any = None

    def parts(self, base: int, longest: int) -> Iterator[Part]:
        """Parts of at most `longest` elements, to be compared with what lies at the address `base`."""
        entry = self.source.entry
        elements, width, rule = elements_of(entry.dtype, entry.shape), width_of(entry.dtype), rule_of(entry.dtype)
        for first in range(0, elements, longest):
            yield Part(
                number=self.number,
                now=self.address + first * width,
                base=base + first * width,
                count=min(longest, elements - first),
                width=width,
                first=first,
                rule=rule,
                elements=elements,
            )


def located(sources: Sequence[TensorSource]) -> Iterator[list[Located]]:
    """Sources, together as long as what was made for it takes little memory.

    The bits of a source that is a view take none, so without casts all come at once.
    """
    batch: list[Located] = []
    made = 0
    for number, source in enumerate(sources):
        if made >= _BATCH:
            yield batch
            batch, made = [], 0
        if source.is_view:
            batch.append(Located(number, source, source.address))
        else:
            bits = twin.flat_bits(source.tensor())
            batch.append(Located(number, source, bits.data_ptr(), bits))
            made += source.entry.nbytes
    yield batch


class Kept(Generic[MadeT]):
    """What was made last for tensors at some addresses. It holds numbers and keeps no tensor alive."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._key: Any = None
        self._made: MadeT | None = None

    def of(self, batch: Sequence[Located], make: Callable[[], MadeT]) -> MadeT:
        """The same again if tensors of the same kind lie there; else `make` makes it."""
        key = [(each.source.entry, each.address) for each in batch]
        if self._made is None or key != self._key:
            self._made, self._key = make(), key
        return self._made
