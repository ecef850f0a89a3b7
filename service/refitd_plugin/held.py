"""Open files, by name."""

import os
from collections.abc import Iterable, Mapping
from weakref import finalize


class HeldFiles:
    """Open files by name. They are closed when nobody has this object any more."""

    def __init__(self, files: Mapping[str, int]) -> None:
        """Take descriptors over."""
        self.files = files
        finalize(self, close_all, list(files.values()))


def close_all(files: Iterable[int]) -> None:
    """Close descriptors."""
    for fd in files:
        os.close(fd)
