"""What Linux has, and Python leaves out where it was built against an older libc than the one that it runs on.

The Pythons that uv and conda install are such: they lack `os.memfd_create` (glibc 2.27), and `os.pidfd_open`, which
depends on the kernel's headers. Constants are those of all machines that torch is built for.
"""

import ctypes
import errno
import fcntl
import os

GET_FILE_LOCK: int = getattr(fcntl, "F_OFD_GETLK", 36)
SET_FILE_LOCK: int = getattr(fcntl, "F_OFD_SETLK", 37)
"""Commands of fcntl(2): query and set a lock of an open file description."""

_CLOSE_ON_EXEC = 1  # MFD_CLOEXEC
_PIDFD_OPEN = 434  # of syscall(2), the same number on every machine


def memory_file(name: str) -> int:
    """Make a file without a place, in memory (memfd_create(2)).

    Args:
        name: what /proc shows it as.

    Returns:
        Its descriptor, which programs that are executed do not inherit.

    Raises:
        OSError: there is no such memory.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, _CLOSE_ON_EXEC)
    return _called("memfd_create", name.encode(), _CLOSE_ON_EXEC)


def process_descriptor(pid: int) -> int:
    """Open a process, to see when it has ended (pidfd_open(2)). Programs that are executed do not inherit it.

    Raises:
        OSError: it has ended; or the kernel has no such descriptors.
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _called("syscall", _PIDFD_OPEN, pid, 0)


def _called(name: str, *arguments: bytes | int) -> int:
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is None:
        raise OSError(errno.ENOSYS, f"this libc has no {name}")
    values = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    found = int(function(*values))
    if found < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found
