"""A file of the trainer's, opened for reading: a plain file, or a link to one, and nothing that makes a reader wait."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from refitd_client.errors import InvalidWeightsError
from refitd_client.files.plain_file import NotPlainError, open_plain


@contextmanager
def opened(path: Path) -> Generator[int, None, None]:
    """Its descriptor, for the length of the block.

    Raises:
        InvalidWeightsError: it cannot be read, or is no plain file.
    """
    try:
        fd = open_plain(path, follow=True)
    except NotPlainError as error:
        raise InvalidWeightsError(f"{path} is not a plain file") from error
    except OSError as error:
        raise InvalidWeightsError(f"{path} cannot be read: {error.strerror}") from error
    try:
        yield fd
    finally:
        os.close(fd)
