"""A file of the trainer's, opened for reading: a plain file, or a link to one, and nothing that makes a reader wait."""

import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from refitd_client.errors import InvalidWeightsError


@contextmanager
def opened(path: Path) -> Generator[int, None, None]:
    """Its descriptor, for the length of the block.

    Raises:
        InvalidWeightsError: it cannot be read, or is no plain file.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would wait for its other end
    except OSError as error:
        raise InvalidWeightsError(f"{path} cannot be read: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise InvalidWeightsError(f"{path} is not a plain file")
        yield fd
    finally:
        os.close(fd)
