"""What one rank copies into the files of a slot, in order; and which blocks of the files it digests. Pure.

Ranks go through the files alike, so that blocks which several of them write are whole early.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from refitd_client.contract.manifest import BLOCK, blocks
from refitd_client.sharded.layout import Location
from refitd_client.sharded.parts import SentPart
from refitd_client.transport.shards.strips import Strip, cut


@dataclass(frozen=True, slots=True)
class SlotPiece:
    """Bytes of a part from byte `at` of the part on, which go to a `strip` of their file.

    When it is there, so are all others of this rank that begin before byte `reached` of the file.
    """

    at: int
    strip: Strip
    reached: int


@dataclass(frozen=True, slots=True)
class SlotPart:
    """A part, and its pieces. `file` is the file's number."""

    sent: SentPart
    file: int
    pieces: Sequence[SlotPiece]


def slot_parts(
    parts: Sequence[SentPart],
    locations: Mapping[str, Location],
    sizes: Sequence[int],
    *,
    made: Collection[str] = (),
    most: int = BLOCK,
) -> list[SlotPart]:
    """The parts of a rank in the order of the files, cut into pieces of at most `most` bytes.

    Args:
        parts: what the rank writes.
        locations: where each tensor lies.
        sizes: of the files.
        made: tensors that come last, since they do not lie as they are published.
        most: bytes of a piece.
    """

    def turn(each: SentPart) -> tuple[bool, int, int]:
        where = locations[each.entry.name]
        return each.entry.name in made, where.file, where.offset

    placed = sorted(parts, key=turn)
    reached = list(sizes)
    found: list[SlotPart] = []
    for each in reversed(placed):
        where = locations[each.entry.name]
        strips: list[tuple[int, Strip]] = []
        at = 0
        for strip in each.strips:
            for piece in cut(strip, most):
                strips.append((at, piece._replace(begin=where.offset + piece.begin)))
                at += piece.nbytes
        pieces: list[SlotPiece] = []
        for at, piece in reversed(strips):
            pieces.append(SlotPiece(at, piece, reached[where.file]))
            reached[where.file] = min(reached[where.file], piece.begin)
        found.append(SlotPart(each, where.file, pieces[::-1]))
    return found[::-1]


def in_order_of_files(locations: Mapping[str, Location]) -> list[str]:
    """The tensors' names in the order in which they lie in the files."""
    return sorted(locations, key=lambda name: (locations[name].file, locations[name].offset))


@dataclass(frozen=True, slots=True)
class FileBlock:
    """Bytes `begin` to `end` of file number `file`, which are digested together."""

    file: int
    begin: int
    end: int


def blocks_of(sizes: Sequence[int]) -> list[FileBlock]:
    """The blocks of files of these sizes. Rank r of n digests every n-th, from the r-th on."""
    return [FileBlock(file, begin, end) for file, size in enumerate(sizes) for begin, end in blocks(size)]


def digests_of_files(sizes: Sequence[int], shares: Sequence[Sequence[bytes]]) -> list[list[bytes]]:
    """The digests of each file's blocks, from what each rank has of its own."""
    found: list[list[bytes]] = [[] for _ in sizes]
    for number, block in enumerate(blocks_of(sizes)):
        rank, place = number % len(shares), number // len(shares)
        found[block.file].append(shares[rank][place])
    return found
