"""The bytes of a version that one engine rank needs, as the rank says it and a trainer reads it.

A rank that knows how its model is loaded writes them into its own folder, `<root>/.refitd/receivers/<name>/`, and says
their digest when it is asked what it is. A trainer that sends to the rank reads the file, sends these bytes alone, and
names the digest in its offer, which is authenticated. The rank takes part only if that is the digest of what it needs
then. So the file need not be trusted: what is not of the digest is not used, and a rank with other needs refuses.

Parts of tensors have no fingerprint in the offer's list, which is of whole tensors. So the offer also has, for each
digest, what the needed bytes of each tensor that is needed in part add to its fingerprint.

A receiver keeps what its rank needs in little more memory than that takes. A load plan reads a tensor by distances from
its first byte, so a tensor keeps its layout, and only the place of its first byte is chosen. Bytes that are not needed
have no memory of their own: needed bytes of other tensors lie there.

    rows       memory for the rows from the first needed one to the last; the tensor begins before it, or ends after it
    columns    as many tensors with the same rows as fit beside each other: each lies in the gaps of the others
    nothing    no memory: such a tensor, as an expert of another rank, begins where the memory does

Each tensor lies within the memory all the same, as readers check that. So there may be more memory than is needed, by
the part of one tensor that is not needed at the most; and columns of a tensor that finds no other one take its rows.
"""

import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from refitd_client.contract.decoding import from_json
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.files.plain_file import plain_file, read_at
from refitd_client.transport.offer import ALIGNED, OfferedTensor, side_by_side
from refitd_client.transport.schedule import Strip, strip
from refitd_client.transport.script import BlockWord, MemberScript, StripSide

FOLDER = "receivers"
PREFIX = "needs-"
_NEEDS_BYTES = 64 * 2**20


PartialNeeds = dict[str, tuple[Strip, ...]]
"""The strips of each tensor that is needed in part, by name."""


class TensorNeeds(msgspec.Struct, frozen=True, array_like=True):
    """The size of one tensor in bytes, and the strips of it that are needed: none where the rank does not hold it."""

    nbytes: int
    strips: tuple[Strip, ...] = ()

    @property
    def is_partial(self) -> bool:
        """Whether some of it is needed, and not all."""
        return bool(self.strips) and sum(each.nbytes for each in self.strips) < self.nbytes


class RankNeeds(msgspec.Struct, frozen=True):
    """What one rank needs of each tensor of a version, by name."""

    tensors: dict[str, TensorNeeds]

    def fits(self, sizes: Mapping[str, int]) -> bool:
        """Whether it is of tensors of these names and sizes, and of bytes that they have."""
        if {name: each.nbytes for name, each in self.tensors.items()} != dict(sizes):
            return False
        return all(_is_within(part, each.nbytes) for each in self.tensors.values() for part in each.strips)

    def partial(self) -> PartialNeeds:
        """The tensors that are needed in part, in order of their names."""
        return {name: each.strips for name, each in sorted(self.tensors.items()) if each.is_partial}


class NeedsRefusedError(ValueError):
    """A file that says nothing of use. The message is a sentence."""


def encode(needs: RankNeeds) -> tuple[bytes, str]:
    """The bytes of its file, and their digest."""
    data = msgspec.json.encode(needs)
    return data, xxhash.xxh3_128_hexdigest(data)


def path_of(root: Path, receiver: str, digest: str) -> Path:
    return root / SERVICE_FOLDER / FOLDER / receiver / f"{PREFIX}{digest}"


def read_needs(root: Path, receiver: str, digest: str) -> RankNeeds:
    """Read what a rank needs. Raises NeedsRefusedError: it is another one, or malformed; OSError: it is not there, or
    cannot be read.
    """
    if not digest.isalnum():
        raise NeedsRefusedError(f"{digest[:50]!a} is no digest")
    with plain_file(path_of(root, receiver, digest)) as fd:
        size = os.fstat(fd).st_size
        data = read_at(fd, min(size, _NEEDS_BYTES), 0)
    if xxhash.xxh3_128_hexdigest(data) != digest:
        raise NeedsRefusedError("the file is not what the rank has announced")
    try:
        return from_json(data, RankNeeds)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise NeedsRefusedError(f"the file cannot be read: {str(error)[:200]!a}") from error


def whole(nbytes: int) -> TensorNeeds:
    return TensorNeeds(nbytes, (strip(0, nbytes),) if nbytes else ())


def numbered(needs: RankNeeds, names: Sequence[str]) -> dict[int, tuple[Strip, ...]]:
    """The strips that are needed, by the tensors' numbers, for the schedule."""
    found = ((number, needs.tensors[name].strips) for number, name in enumerate(names))
    return {number: strips for number, strips in found if strips}


def _is_within(each: Strip, nbytes: int) -> bool:
    if each.begin < 0 or each.width <= 0 or each.rows <= 0 or (each.rows > 1 and each.pitch < each.width):
        return False
    return each.end <= nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatLayout:
    """Where tensors lie in one piece of memory: their offsets in bytes, in the offer's order, and the bytes of all."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    nbytes: int


def flat_layout(tensors: Sequence[OfferedTensor]) -> FlatLayout:
    """The tensors of an offer side by side, as a schedule has them."""
    sizes = tuple(tensor.nbytes for tensor in tensors)
    offsets, nbytes = side_by_side(sizes)
    return FlatLayout(offsets=tuple(offsets), sizes=sizes, nbytes=nbytes)


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
        blocks = (BlockWord(block.lane, tuple(map(self._moved, block.moves))) for block in script.blocks)
        return MemberScript(lanes=script.lanes, blocks=tuple(blocks))

    def _moved(self, move: StripSide) -> StripSide:
        tensor = max(bisect_right(self.whole.offsets, move.offset) - 1, 0)
        return move._replace(offset=move.offset - self.whole.offsets[tensor] + self.packed.offsets[tensor])


def packed_layout(sizes: Sequence[int], needs: Mapping[int, Sequence[Strip]]) -> FlatLayout:
    """The places of tensors of which some bytes are needed. No two needed bytes have the same place. `needs`: the bytes
    of each that are needed, by its number. Of those that are not there none is.
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
