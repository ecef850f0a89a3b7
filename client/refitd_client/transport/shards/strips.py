"""Parts of a tensor as strips of its bytes, and what two strips have in common. Pure.

A strip is `rows` rows of `width` bytes, each `pitch` bytes after the one before. Rows of a tensor that is split along
its first dimension are one strip of one row, and columns of a matrix one strip of as many rows as the matrix has.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Strip(NamedTuple):
    """Bytes of one tensor in row-major order. `pitch` is `width` where there is one row. Rows do not overlap."""

    begin: int
    width: int
    rows: int = 1
    pitch: int = 0

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return self.width * self.rows

    @property
    def end(self) -> int:
        """The byte after its last."""
        return self.begin + (self.rows - 1) * self.pitch + self.width

    @property
    def is_whole(self) -> bool:
        """Whether its bytes lie together."""
        return self.rows == 1 or self.pitch == self.width


def strip(begin: int, width: int, rows: int = 1, pitch: int = 0) -> Strip:
    """A strip; rows that follow on each other are one row."""
    if rows == 1 or pitch == width:
        return Strip(begin, width * rows, 1, width * rows)
    return Strip(begin, width, rows, pitch)


def joined(runs: Iterable[tuple[int, int]]) -> list[Strip]:
    """Runs of bytes as few strips, in their order.

    Args:
        runs: (begin, size) of each, in ascending order.
    """
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
