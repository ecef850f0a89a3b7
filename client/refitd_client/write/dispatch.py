"""How the bytes of a version's shards go over the bus: in the order of the file, cut where the blocks of digests end.

So each block is whole after some piece, and can be digested while the next ones are on their way.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from refitd_client.contract.digest import BLOCK
from refitd_client.tensors.source import TensorSource
from refitd_client.write.plan import Shard


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `begin` to `end` of a tensor, which lie from `offset` on in their file."""

    source: TensorSource
    begin: int
    end: int
    offset: int

    @property
    def stop(self) -> int:
        """Where it ends in the file."""
        return self.offset + self.end - self.begin


def pieces(shard: Shard) -> Iterator[Piece]:
    """A shard's tensors. One that would be made anew for each piece is never cut."""
    for offset, source in shard.placed:
        size = source.entry.nbytes
        begin = 0
        while begin < size:
            end = min(size, begin + BLOCK - (offset + begin) % BLOCK) if source.is_view else size
            yield Piece(source, begin, end, offset + begin)
            begin = end


def blocks(size: int) -> list[tuple[int, int]]:
    """Where the blocks of a file begin and end."""
    return [(begin, min(begin + BLOCK, size)) for begin in range(0, max(1, size), BLOCK)]
