"""Where a receiver keeps what it needs of a version, in little more memory than that takes. Pure.

A load plan reads a tensor by distances from its first byte, so a tensor keeps its layout, and only the place of its
first byte is chosen. Bytes that are not needed have no memory of their own: needed bytes of other tensors lie there.

    rows       memory for the rows from the first needed one to the last; the tensor begins before it, or ends after it
    columns    as many tensors with the same rows as fit beside each other: each lies in the gaps of the others
    nothing    no memory: such a tensor, as an expert of another rank, begins where the memory does

Each tensor lies within the memory all the same, as readers check that. So there may be more memory than is needed, by
the part of one tensor that is not needed at the most; and columns of a tensor that finds no other one take its rows.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from refitd_client.transport.group.transfer import FlatLayout
from refitd_client.transport.ipc.offer import ALIGNED
from refitd_client.transport.shards.script import BlockWord, MemberScript
from refitd_client.transport.shards.strips import Strip


@dataclass(frozen=True, slots=True)
class PackedTensors:
    """Tensors of `nbytes` bytes that lie together in `extent` bytes of memory. `begin` is the byte of each at which the
    first needed one is: the first tensor begins so many bytes before that memory. `members[k]` lies `k * step` bytes
    after the first.
    """

    members: tuple[int, ...]
    begin: int
    extent: int
    step: int
    nbytes: int

    @property
    def after(self) -> int:
        """How far the last one ends after that memory; negative where it ends within."""
        return self.nbytes - self.begin + (len(self.members) - 1) * self.step - self.extent


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedPlaces:
    """Where tensors lie that a schedule has put side by side (`whole`), at a receiver that keeps what it needs."""

    whole: FlatLayout
    packed: FlatLayout

    def of(self, script: MemberScript) -> MemberScript:
        """A receiver's script for memory that is packed. Each move of it is of one tensor."""
        if self.packed is self.whole:
            return script
        blocks = (BlockWord(block.lane, tuple(self._numbers(block))) for block in script.blocks)
        return MemberScript(lanes=script.lanes, blocks=tuple(blocks))

    def _numbers(self, block: BlockWord) -> Iterator[int]:
        for offset, pitch, width, rows in block.moves:
            tensor = max(bisect_right(self.whole.offsets, offset) - 1, 0)
            yield from (offset - self.whole.offsets[tensor] + self.packed.offsets[tensor], pitch, width, rows)


def packed_layout(sizes: Sequence[int], needs: Mapping[int, Sequence[Strip]]) -> FlatLayout:
    """The places of tensors of which some bytes are needed. No two needed bytes have the same place.

    Args:
        sizes: the tensors' in bytes.
        needs: the bytes of each that are needed, by its number. Of those that are not there none is.
    """
    together = sorted(_together(sizes, needs), key=lambda each: each.begin - max(each.after, 0))
    places, end = list[int](), 0
    for each in together:
        place = end + (each.begin - end) % ALIGNED  # so that the tensors begin at multiples of `ALIGNED`
        places.append(place)
        end = place + each.extent
    lead = max((each.begin - place for each, place in zip(together, places, strict=True)), default=0)
    lead = max(0, -(-lead // ALIGNED) * ALIGNED)
    offsets = [0] * len(sizes)
    for each, place in zip(together, places, strict=True):
        for number, member in enumerate(each.members):
            offsets[member] = lead + place - each.begin + number * each.step
    nbytes = max((at + size for at, size in zip(offsets, sizes, strict=True)), default=0)
    return FlatLayout(offsets=tuple(offsets), sizes=tuple(sizes), nbytes=nbytes)


def _together(sizes: Sequence[int], needs: Mapping[int, Sequence[Strip]]) -> Iterator[PackedTensors]:
    """The tensors of which something is needed, those of the same columns together."""
    alike: dict[tuple[Strip, int], list[int]] = {}
    for number, size in enumerate(sizes):
        strips = needs.get(number, ())
        if not strips:
            continue
        if (columns := _columns(strips)) is not None:
            alike.setdefault((columns, size), []).append(number)
            continue
        begin = min(each.begin for each in strips)
        yield PackedTensors((number,), begin, max(each.end for each in strips) - begin, 0, size)
    for (columns, size), numbers in alike.items():
        step = -(-columns.width // ALIGNED) * ALIGNED
        most = 1 + (columns.pitch - columns.width) // step
        for first in range(0, len(numbers), most):
            members = tuple(numbers[first : first + most])
            extent = columns.end - columns.begin + (len(members) - 1) * step
            yield PackedTensors(members, columns.begin, extent, step, size)


def _columns(strips: Sequence[Strip]) -> Strip | None:
    """Strips as one of rows with gaps; None where they are none, or differ in where their rows begin."""
    first = min(strips)
    alike = {(each.pitch, each.width, each.begin % each.pitch) for each in strips}
    if first.rows == 1 or len(alike) > 1:
        return None
    rows = (max(each.end for each in strips) - first.begin - first.width) // first.pitch + 1
    return Strip(first.begin, first.width, rows, first.pitch)
