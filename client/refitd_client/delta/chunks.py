"""What of a copy in host memory goes over the bus together, to be compared on a GPU. Numbers only; pure.

up      the copy's bytes into a room there: one run, as long as the tensors lie in the copy in the list's order. Places
        in a room count from its begin: rooms are taken anew for each step, and need not lie where they lay before
down    tensors' bytes back into the copy, by tensor, where anything changed
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from refitd_client.fingerprint.rows import Listed, Part, alike

ALIGNMENT = 512
"""Bytes: as torch places tensors."""


@dataclass(frozen=True, slots=True)
class Run:
    """`count` bytes from the address `source` to the address `target`, or to so many bytes behind a room's begin."""

    target: int
    source: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The parts from `begin` to `end` of a list. `firsts` are the places among them where the runs `down` begin."""

    begin: int
    end: int
    up: Sequence[Run]
    down: Sequence[Run]
    firsts: Sequence[int]

    def changed(self, counts: NDArray[np.int64]) -> list[Run]:
        """The runs down that changed, by how many elements of each part did."""
        sums = np.add.reduceat(counts, self.firsts)
        return [self.down[place] for place in np.flatnonzero(sums).tolist()]


@dataclass(frozen=True, slots=True)
class Chunked:
    """A list of parts whose bases are where they will be behind the begin of a room, and its chunks."""

    listed: Listed
    chunks: Sequence[Chunk]

    def begins(self, rooms: Sequence[int]) -> NDArray[np.int64]:
        """The address of each part's room: chunks take the rooms in turns."""
        sizes = [chunk.end - chunk.begin for chunk in self.chunks]
        return np.repeat(np.resize(np.array(rooms, np.int64), len(sizes)), sizes)


def chunked(parts: Iterable[Part], size: int) -> list[Chunked]:
    """Cut parts, whose bases are addresses in host memory, into chunks for rooms of `size` bytes.

    No part may be larger than a room.
    """
    return [_chunked(listed.parts, size) for listed in alike(parts)]


def _chunked(parts: Sequence[Part], size: int) -> Chunked:
    moved: list[Part] = []
    chunks: list[Chunk] = []
    begin = 0
    while begin < len(parts):
        ups = [Run(0, parts[begin].base, 0)]
        end = begin
        while end < len(parts) and (up := _placed(ups[-1], parts[end])).target + up.count <= size:
            ups[-1 if up.target == ups[-1].target else len(ups) :] = [up]
            moved.append(replace(parts[end], base=up.target + parts[end].base - up.source))
            end += 1
        if end == begin:
            raise ValueError(f"a part of {parts[begin].count * parts[begin].width} bytes goes into no room of {size}")
        chunks.append(_chunk(parts, begin, end, ups))
        begin = end
    return Chunked(Listed(moved), chunks)


def _placed(last: Run, part: Part) -> Run:
    """The run with a part: the last one, longer, if it begins right behind it, or a new one behind it."""
    nbytes = part.count * part.width
    if 0 <= part.base - (last.source + last.count) < ALIGNMENT:
        return replace(last, count=part.base + nbytes - last.source)
    return Run(-(-(last.target + last.count) // ALIGNMENT) * ALIGNMENT, part.base, nbytes)


def _chunk(parts: Sequence[Part], begin: int, end: int, ups: Sequence[Run]) -> Chunk:
    downs: list[Run] = []
    firsts: list[int] = []
    for place in range(begin, end):
        part = parts[place]
        if place > begin and parts[place - 1].number == part.number:
            downs[-1] = replace(downs[-1], count=downs[-1].count + part.count * part.width)
        else:
            downs.append(Run(part.base, part.now, part.count * part.width))
            firsts.append(place - begin)
    return Chunk(begin=begin, end=end, up=ups, down=downs, firsts=firsts)
