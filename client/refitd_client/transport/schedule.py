"""Parts of tensors as strips of bytes, and who sends which of them to whom. Pure.

A strip is `rows` rows of `width` bytes, each `pitch` bytes after the one before. Rows of a tensor that is split along
its first dimension are one strip of one row, and columns of a matrix one strip of as many rows as the matrix has.

A transfer is planned once, from what trainer processes hold and what engine ranks need.
Each sender has the bytes of its shards one after the other in memory of its own. It is planned as if each receiver had
room for the whole version (`needs.packed_layout` puts what it needs elsewhere). Receivers that need the same bytes of a
tensor get them by one broadcast. So a *lane* is a sender with the receivers of such broadcasts; lanes are process
groups of their own, in which the sender is rank 0. A lane's bytes go in *blocks*. All blocks have one order, in which
the senders take turns: a member that does its own blocks in that order never waits for one that waits for it.

    held       sender 0: rows 0-3 of w      needs    a: rows 0-1, b: rows 2-7 of w
               sender 1: rows 4-7 of w
    lanes      0 → a (rows 0-1), 0 → b (rows 2-3), 1 → b (rows 4-7)
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple


class Strip(NamedTuple):
    """Bytes of one tensor in row-major order. `pitch` is `width` where there is one row. Rows do not overlap."""

    begin: int
    width: int
    rows: int = 1
    pitch: int = 0

    @property
    def nbytes(self) -> int:
        return self.width * self.rows

    @property
    def end(self) -> int:
        """The byte after its last."""
        return self.begin + (self.rows - 1) * self.pitch + self.width

    @property
    def is_whole(self) -> bool:
        return self.rows == 1 or self.pitch == self.width


def strip(begin: int, width: int, rows: int = 1, pitch: int = 0) -> Strip:
    """A strip; rows that follow on each other are one row."""
    if rows == 1 or pitch == width:
        return Strip(begin, width * rows, 1, width * rows)
    return Strip(begin, width, rows, pitch)


def joined(runs: Iterable[tuple[int, int]]) -> list[Strip]:
    """Runs of bytes as few strips, in their order. `runs`: (begin, size) of each, in ascending order."""
    found: list[list[int]] = []
    for begin, size in runs:
        last = found[-1] if found else None
        if last is not None and last[2] == 1 and last[0] + last[1] == begin:
            last[1] += size
        elif last is not None and last[1] == size and (last[2] == 1 or begin == last[0] + last[2] * last[3]):
            last[3] = begin - last[0] if last[2] == 1 else last[3]
            last[2] += 1
        else:
            found.append([begin, size, 1, size])
    return [strip(*each) for each in found]


def common(one: Strip, other: Strip) -> list[Strip]:
    """The bytes that two strips have in common, as strips of which each row lies in one row of either."""
    if one.rows == 1 and other.rows == 1:
        begin, end = max(one.begin, other.begin), min(one.end, other.end)
        return [strip(begin, end - begin)] if begin < end else []
    if one.rows == 1:
        return _rows_within(other, one.begin, one.end)
    if other.rows == 1:
        return _rows_within(one, other.begin, other.end)
    if one.pitch == other.pitch and _is_within_rows(one) and _is_within_rows(other):
        return _rectangle(one, other)
    rows = [strip(one.begin + row * one.pitch, one.width) for row in range(one.rows)]
    return [each for row in rows for each in common(row, other)]


def _rows_within(rows: Strip, begin: int, end: int) -> list[Strip]:
    """What lies between two bytes: whole rows, and parts of the first and the last."""
    first = max(0, (begin - rows.begin - rows.width) // rows.pitch + 1)
    stop = min(rows.rows, -(-(end - rows.begin) // rows.pitch))
    if first >= stop:
        return []
    found: list[Strip] = []
    at, last = rows.begin + first * rows.pitch, rows.begin + (stop - 1) * rows.pitch
    if at < begin or (first == stop - 1 and at + rows.width > end):
        found.append(strip(max(at, begin), min(at + rows.width, end) - max(at, begin)))
        first, at = first + 1, at + rows.pitch
    is_cut = first < stop and last + rows.width > end
    whole = stop - first - is_cut
    if whole > 0:
        found.append(strip(at, rows.width, whole, rows.pitch))
    if is_cut:
        found.append(strip(last, end - last))
    return found


def _is_within_rows(each: Strip) -> bool:
    """Whether its rows are columns of a matrix whose rows are as long as its pitch."""
    return each.begin % each.pitch + each.width <= each.pitch


def _rectangle(one: Strip, other: Strip) -> list[Strip]:
    pitch = one.pitch
    row = max(one.begin // pitch, other.begin // pitch)
    stop = min(one.begin // pitch + one.rows, other.begin // pitch + other.rows)
    column = max(one.begin % pitch, other.begin % pitch)
    end = min(one.begin % pitch + one.width, other.begin % pitch + other.width)
    if row >= stop or column >= end:
        return []
    return [strip(row * pitch + column, end - column, stop - row, pitch)]


def offset_in(each: Strip, at: int) -> int:
    """Where a byte of the tensor lies among the bytes of a strip that has it."""
    if each.rows == 1:
        return at - each.begin
    row, column = divmod(at - each.begin, each.pitch)
    return row * each.width + column


def cut(each: Strip, most: int) -> Sequence[Strip]:
    """The same in strips of at most `most` bytes."""
    if each.nbytes <= most:
        return [each]
    if each.rows == 1:
        return [strip(at, min(most, each.end - at)) for at in range(each.begin, each.end, most)]
    if each.width > most:
        rows = (strip(each.begin + row * each.pitch, each.width) for row in range(each.rows))
        return [piece for row in rows for piece in cut(row, most)]
    some = most // each.width
    return [
        strip(each.begin + row * each.pitch, each.width, min(some, each.rows - row), each.pitch)
        for row in range(0, each.rows, some)
    ]


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


def everything(sizes: Sequence[int]) -> dict[int, tuple[Strip, ...]]:
    return {number: (strip(0, size),) for number, size in enumerate(sizes) if size}


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
