"""The digest at the end of a delta's file, of all bytes before it.

    refit-delta/2   by blocks, as manifests have it (`contract/digest.py`): who writes a file digests its bytes once
    refit-delta/1   their XXH3-128, in one go

Up to 16 MiB both are the same.
"""

from functools import partial
from threading import Event

import xxhash

from refitd_client.contract.digest import combined, digest_of_pieces, in_blocks
from refitd_client.delta.layout import FIRST_FORMAT, FORMAT
from refitd_client.lanes import in_lanes, lanes_for


def formats_with(data: memoryview, digest: bytes) -> tuple[str, ...]:
    """The formats in which a file of these bytes ends in this digest. None where it is damaged."""
    blocks = _digests(data)
    if combined(blocks) == digest:
        return (FORMAT, FIRST_FORMAT) if len(blocks) == 1 else (FORMAT,)
    is_first = len(blocks) > 1 and xxhash.xxh3_128_digest(data) == digest
    return (FIRST_FORMAT,) if is_first else ()


def _digests(data: memoryview) -> list[bytes]:
    """Of its blocks, on as many cores as that is worth."""
    blocks = in_blocks([data])
    found = [b""] * len(blocks)

    def take(number: int, _: Event) -> None:
        found[number] = digest_of_pieces(blocks[number])

    in_lanes([partial(take, number) for number in range(len(blocks))], lanes=lanes_for(len(blocks)))
    return found
