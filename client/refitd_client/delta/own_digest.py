"""The digest at the end of a delta's file, of all bytes before it.

    refit-delta/2   by blocks, as manifests have it (`contract/digest.py`): who writes a file digests its bytes once
    refit-delta/1   their XXH3-128, in one go

Up to 16 MiB both are the same.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from threading import Event

from refitd_client.contract.digest import BLOCK, combined, digest_of_pieces, in_blocks
from refitd_client.delta.layout import FIRST_FORMAT, FORMAT
from refitd_client.files.file_bytes import read_at
from refitd_client.lanes import in_lanes, lanes_for

_PIECE = 2**20  # bytes that are read at a time


def formats_with(data: memoryview, digest: bytes) -> tuple[str, ...]:
    """The formats in which a file of these bytes ends in this digest. None where it is damaged."""
    blocks = in_blocks([data])
    return _formats([partial(digest_of_pieces, block) for block in blocks], digest, [data])


def formats_of(fd: int, size: int, digest: bytes) -> tuple[str, ...]:
    """The same for the first `size` bytes of an open file. Takes the memory of a piece for each thread.

    Raises:
        OSError: it cannot be read, or is shorter.
    """
    begins = range(0, max(1, size), BLOCK)
    blocks = [partial(_digest_of, fd, begin, min(begin + BLOCK, size)) for begin in begins]
    return _formats(blocks, digest, _pieces(fd, 0, size))


def _formats(
    blocks: Sequence[Callable[[], bytes]], digest: bytes, pieces: Iterable[bytes | memoryview]
) -> tuple[str, ...]:
    """`blocks` digest a block each, on as many cores as that is worth."""
    found = [b""] * len(blocks)

    def take(number: int, _: Event) -> None:
        found[number] = blocks[number]()

    in_lanes([partial(take, number) for number in range(len(blocks))], lanes=lanes_for(len(blocks)))
    if combined(found) == digest:
        return (FORMAT, FIRST_FORMAT) if len(blocks) == 1 else (FORMAT,)
    is_first = len(blocks) > 1 and digest_of_pieces(pieces) == digest
    return (FIRST_FORMAT,) if is_first else ()


def _digest_of(fd: int, begin: int, end: int) -> bytes:
    return digest_of_pieces(_pieces(fd, begin, end))


def _pieces(fd: int, begin: int, end: int) -> Iterator[bytes]:
    for at in range(begin, end, _PIECE):
        yield read_at(fd, min(_PIECE, end - at), at)
