"""What the C library keeps of memory that was freed: a process with many threads pays most for it."""

import ctypes

_ARENA_MAX = -8  # of glibc's malloc.h
ARENAS = 1  # with two, what is kept still grows from version to version


def share_arenas() -> bool:
    """Have all threads share one of glibc's arenas, each of which keeps what was freed in it.

    Call it before there are threads. Returns whether it worked: not with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_ARENA_MAX, ARENAS) == 1
