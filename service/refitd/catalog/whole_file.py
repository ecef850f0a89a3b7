"""A file read into memory and digested on the way, on as many cores as that is worth."""

from functools import partial
from threading import Event

import numpy as np
from numpy.typing import NDArray

from refitd.catalog.contents import ReadingStoppedError
from refitd_client.contract.digest import BLOCK, digest_of_block, joined
from refitd_client.file_bytes import fill
from refitd_client.lanes import in_lanes, lanes_for


def read_whole(fd: int, data: NDArray[np.uint8], *, stop: Event | None = None) -> str:
    """Fill `data` with the first bytes of a file. Returns their digest, as a manifest has it.

    Raises:
        ReadingStoppedError: `stop` was set.
        OSError: the file cannot be read, or is shorter.
    """
    count = max(1, -(-len(data) // BLOCK))
    digests = [b""] * count

    def take(number: int, _: Event) -> None:
        if stop is not None and stop.is_set():
            raise ReadingStoppedError
        block = data[number * BLOCK : (number + 1) * BLOCK]
        fill(fd, block.data, number * BLOCK)
        digests[number] = digest_of_block(block)

    in_lanes([partial(take, number) for number in range(count)], lanes=lanes_for(count))
    return joined(digests)
