"""A delta's file, held open."""

import os
from weakref import finalize

import numpy as np

from refitd_client.delta import Delta, DeltaRefusedError, parse_delta
from refitd_client.files.file_bytes import fill
from refitd_plugin.source import SourceRefusedError, VersionPlace


class KeptDelta:
    """A delta's file, held open: it can be read again whatever became of its folder. Closed when nobody has it."""

    def __init__(self, fd: int, place: VersionPlace, base: str, label: str) -> None:
        """`fd` stays the caller's."""
        self._fd = os.dup(fd)
        self._size = os.fstat(fd).st_size
        self.place, self.base, self.label = place, base, label
        finalize(self, os.close, self._fd)

    def opened(self) -> int:
        """A descriptor of it, the caller's to close."""
        return os.dup(self._fd)

    def read(self) -> Delta:
        """All of it, once more.

        Raises:
            SourceRefusedError: it is not what it was.
            OSError: it cannot be read.
        """
        if os.fstat(self._fd).st_size != self._size:  # before there is room for it: it may be of any size now
            raise SourceRefusedError(f"the changes to {self.label} are not what they were: their file has another size")
        data = np.empty(self._size, np.uint8)
        fill(self._fd, data.data, 0)
        try:
            return parse_delta(data.data)
        except DeltaRefusedError as error:
            raise SourceRefusedError(f"the changes to {self.label} are not what they were: {error}") from error
