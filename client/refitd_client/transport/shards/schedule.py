"""Who sends which bytes to whom: planned once from what trainer ranks hold and what engine ranks need. Pure.

Each sender has the bytes of its shards one after the other in memory of its own. It is planned as if each receiver had
room for the whole version (`packing` puts what it needs elsewhere). Receivers that need the same bytes of a tensor get
them by one broadcast. So a *lane* is a sender with the receivers of such broadcasts; lanes are process groups of their
own, in which the sender is rank 0. A lane's bytes go in *blocks*. All blocks have one order, in which the senders take
turns: a member that does its own blocks in that order never waits for one that waits for it.

    held       sender 0: rows 0-3 of w      needs    a: rows 0-1, b: rows 2-7 of w
               sender 1: rows 4-7 of w
    lanes      0 → a (rows 0-1), 0 → b (rows 2-3), 1 → b (rows 4-7)
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from refitd_client.transport.shards.strips import Strip, common, cut, offset_in, strip

ALONE_BYTES = 4 * 2**20
"""Bytes that lie together and are so many are a block of their own: they are sent from and received to their place."""

Needs = Mapping[int, Sequence[Strip]]
"""The bytes of each tensor, by its number, that a receiver needs. Tensors that are not there are not sent to it."""


class HeldStrip(NamedTuple):
    """Bytes of a tensor that a sender has, row after row from byte `at` of its memory on."""

    tensor: int
    strip: Strip
    at: int


class StripMove(NamedTuple):
    """`rows` rows of `width` bytes, from the sender's memory to the receiver's. Pitches are bytes from row to row."""

    source: int
    source_pitch: int
    target: int
    target_pitch: int
    width: int
    rows: int

    @property
    def nbytes(self) -> int:
        """How many bytes it moves."""
        return self.width * self.rows


class Lane(NamedTuple):
    """A sender's number, and the names of the receivers that get the same bytes of it."""

    sender: int
    receivers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes that are broadcast at once: those of the moves, one after the other, in lane number `lane`."""

    lane: int
    moves: tuple[StripMove, ...]

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return sum(move.nbytes for move in self.moves)


@dataclass(frozen=True, slots=True)
class Schedule:
    """All lanes, and all blocks in the order in which each member does its own."""

    lanes: tuple[Lane, ...]
    blocks: tuple[Block, ...]


def schedule(
    held: Sequence[Sequence[HeldStrip]], places: Sequence[int], needs: Mapping[str, Needs], most: int
) -> Schedule:
    """Plan a transfer.

    Args:
        held: what each sender sends, by its number. Together they have each byte of the version once.
        places: where each tensor begins in the receivers' memory, in bytes.
        needs: what each receiver needs, by its name.
        most: bytes of a block.
    """
    wanted = [*_classes(len(places), needs)]
    moves: dict[Lane, list[StripMove]] = {}
    for sender, strips in enumerate(held):
        for each in strips:
            for receivers, needed in wanted[each.tensor]:
                found = [piece for one in needed for piece in common(each.strip, one)]
                moves.setdefault(Lane(sender, receivers), []).extend(
                    _move(each, piece, places[each.tensor]) for whole in found for piece in cut(whole, most)
                )
    lanes = tuple(sorted(lane for lane, some in moves.items() if some))
    blocks = [[Block(number, each) for each in _blocks(moves[lane], most)] for number, lane in enumerate(lanes)]
    turns = (block for turn in zip_longest(*blocks) for block in turn if block is not None)
    return Schedule(lanes, tuple(turns))


def everything(sizes: Sequence[int]) -> Needs:
    """The needs of a receiver that takes all bytes of tensors of these sizes."""
    return {number: [strip(0, size)] for number, size in enumerate(sizes) if size}


def _classes(tensors: int, needs: Mapping[str, Needs]) -> Iterator[list[tuple[tuple[str, ...], Sequence[Strip]]]]:
    """For each tensor the receivers that need the same bytes of it, and these bytes."""
    for number in range(tensors):
        found: dict[tuple[Strip, ...], list[str]] = {}
        for name in sorted(needs):
            if strips := needs[name].get(number):
                found.setdefault(tuple(strips), []).append(name)
        yield [(tuple(names), strips) for strips, names in found.items()]


def _move(each: HeldStrip, piece: Strip, place: int) -> StripMove:
    source = each.at + offset_in(each.strip, piece.begin)
    pitch = piece.width
    if piece.rows > 1:
        pitch = each.at + offset_in(each.strip, piece.begin + piece.pitch) - source
    return StripMove(source, pitch, place + piece.begin, piece.pitch, piece.width, piece.rows)


def _blocks(moves: Iterable[StripMove], most: int) -> Iterator[tuple[StripMove, ...]]:
    waiting: list[StripMove] = []
    size = 0
    for move in moves:
        if move.rows == 1 and move.nbytes >= min(ALONE_BYTES, most):
            yield (move,)
            continue
        if size + move.nbytes > most:
            yield tuple(waiting)
            waiting, size = [], 0
        waiting.append(move)
        size += move.nbytes
    if waiting:
        yield tuple(waiting)
