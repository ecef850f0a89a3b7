"""A file read into memory and digested on the way, on as many cores as that is worth.

Blocks are read in pieces: there are fewer blocks than cores in most files. Whoever reads the last piece of one digests
it.
"""

from collections import Counter
from functools import partial
from threading import Event, Lock

import numpy as np
from numpy.typing import NDArray

from refitd_client.contract.digest import BLOCK, digest_of_block, joined
from refitd_client.files.file_bytes import fill
from refitd_client.lanes import in_lanes, lanes_for
from refitd_client.validation.contents import ReadingStoppedError

_PIECE = 2**21


def read_whole(fd: int, data: NDArray[np.uint8], *, stop: Event | None = None) -> str:
    """Fill `data` with the first bytes of a file. Returns their digest, as a manifest has it.

    Raises:
        ReadingStoppedError: `stop` was set.
        OSError: the file cannot be read, or is shorter.
    """
    blocks = [data[begin : begin + BLOCK] for begin in range(0, max(1, len(data)), BLOCK)]
    pieces = [(number, begin) for number, block in enumerate(blocks) for begin in range(0, max(1, len(block)), _PIECE)]
    missing = Counter(number for number, _ in pieces)
    digests = [b""] * len(blocks)
    turn = Lock()

    def take(number: int, begin: int, _: Event) -> None:
        if stop is not None and stop.is_set():
            raise ReadingStoppedError
        block = blocks[number]
        fill(fd, block[begin : begin + _PIECE].data, number * BLOCK + begin)
        with turn:  # for the count alone
            missing[number] -= 1
            is_whole = not missing[number]
        if is_whole:
            digests[number] = digest_of_block(block)

    in_lanes([partial(take, *piece) for piece in pieces], lanes=lanes_for(len(pieces)))
    return joined(digests)
