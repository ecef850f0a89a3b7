"""A file of a version that is written in any order: a shard, new or out of a slot."""

import os

import numpy as np
from numpy.typing import NDArray

from refitd_client.files import durable
from refitd_client.files.mapped import Mapped


class StagedShard:
    """A file of the version that is written in any order, by any thread, and digested by whoever seals it.

    `mapped` is the file in memory where it is recycled and may be written that way.
    """

    def __init__(self, name: str, fd: int, mapped: Mapped | None) -> None:
        """Take over an open file."""
        self.name = name
        self.fd = fd
        self.mapped = mapped

    def put(self, offset: int, data: NDArray[np.uint8]) -> None:
        """Write bytes."""
        if self.mapped is None:
            durable.write_at(self.fd, data.data, offset)
        else:
            durable.overwrite(self.mapped, data, offset)

    def get(self, offset: int, count: int) -> NDArray[np.uint8]:
        """Read back what was written.

        Raises:
            OSError: the file has become shorter.
        """
        if self.mapped is not None:
            return self.mapped.bytes[offset : offset + count]
        data = np.frombuffer(os.pread(self.fd, count, offset), np.uint8)
        if len(data) < count:
            raise OSError(f"{self.name} became shorter while it was read back")
        return data
