"""In which order the bytes of a version's shards go over the bus. Pure.

A file's digest has to be computed from its first byte to its last, by one thread, which takes longer than the bus. So
the files are sent side by side, chunk by chunk, a file to each thread: all threads have work from the first chunk on,
and when the last chunk has arrived a chunk is all that is left to digest. The largest file comes first until it is no
longer the largest, since its thread has the most to do.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from refitd_client.shard import Shard
from refitd_client.tensors import TensorSource


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `begin` to `end` of a tensor, which lie from `offset` on in their file."""

    source: TensorSource
    begin: int
    end: int
    offset: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Pieces that lie one after the other in their file."""

    pieces: Sequence[Piece]

    @property
    def begin(self) -> int:
        """Its first byte in the file."""
        return self.pieces[0].offset

    @property
    def size(self) -> int:
        """Its bytes."""
        return sum(piece.end - piece.begin for piece in self.pieces)


def chunks(shard: Shard, most: int) -> list[Chunk]:
    """A shard's tensors in chunks of at most `most` bytes. One that would be made anew for each piece is never cut."""
    made: list[list[Piece]] = []
    room = 0
    for piece in _pieces(shard, most):
        size = piece.end - piece.begin
        if not made or size > room:
            made.append([])
            room = most
        made[-1].append(piece)
        room -= size
    return [Chunk(pieces) for pieces in made]


def turns(sizes: Sequence[Sequence[int]], lanes: int) -> Iterator[int]:
    """Whose chunk is next, again and again, if each file has chunks of some sizes, and `lanes` files are read at once.

    Files are begun in their order. Of those that were begun, the one with the most left is next.
    """
    left = [sum(each) for each in sizes]
    coming = [iter(each) for each in sizes]
    waiting = [number for number, each in enumerate(sizes) if each]
    while waiting:
        number = max(waiting[:lanes], key=lambda number: left[number])
        left[number] -= next(coming[number])
        if not left[number]:
            waiting.remove(number)
        yield number


def _pieces(shard: Shard, most: int) -> Iterator[Piece]:
    for offset, source in shard.placed:
        size = source.entry.nbytes
        step = most if source.is_view else size
        for begin in range(0, size, max(1, step)):
            yield Piece(source, begin, min(begin + step, size), offset + begin)
