"""Bytes of an open file, all of them: the kernel may give fewer than were asked for, and a file may become shorter."""

import os


def fill(fd: int, data: memoryview, offset: int) -> None:
    """Read into all of `data` from byte `offset` of a file on.

    Raises:
        OSError: they cannot be read, or the file ends before.
    """
    filled = 0
    while filled < len(data):
        count = os.preadv(fd, [data[filled:]], offset + filled)
        if count == 0:
            raise _ended(offset + filled, offset + len(data))
        filled += count


def read_at(fd: int, length: int, offset: int) -> bytes:
    """The `length` bytes from `offset` on; raises as `fill`."""
    data = os.pread(fd, length, offset)
    while len(data) < length:
        more = os.pread(fd, length - len(data), offset + len(data))
        if not more:
            raise _ended(offset + len(data), offset + length)
        data += more
    return data


def _ended(at: int, end: int) -> OSError:
    return OSError(f"the file ended at byte {at} while it was read up to {end}")
