"""Memory of a process: what the C library keeps of it, most where there are many threads, and what bodies take."""

import ctypes
from dataclasses import dataclass

_ARENA_MAX = -8  # of glibc's malloc.h
ARENAS = 1  # with two, what is kept still grows from version to version


def share_arenas() -> bool:
    """Have all threads share one of glibc's arenas, each of which keeps what was freed in it.

    Call it before there are threads. Returns whether it worked: not with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_ARENA_MAX, ARENAS) == 1


@dataclass(slots=True, kw_only=True)
class BodyMemory:
    """The bytes that all HTTP bodies of one kind that are coming in may take together, and those that they take now."""

    most: int
    used: int = 0

    def take(self, size: int) -> bool:
        self.used += size
        return self.used <= self.most

    def give_back(self, size: int) -> None:
        self.used -= size
