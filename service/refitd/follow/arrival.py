"""What has arrived of a version that is being pulled, for others that pull it from here: blocks that were checked.

A block is handed on as soon as its digest was found right, so a chain of followers does not wait for whole versions.
The files are those of the staging folder, by descriptors of their own, which outlive the rename into a version.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from refitd.state.observer import Notifier


@dataclass(slots=True)
class _Arriving:
    fd: int
    size: int
    checked: set[int] = field(default_factory=set[int])


class Arrival:
    """One version. Call it on the event loop's thread. `is_open` from when its files are there until `close`."""

    def __init__(self, version: str, block: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing yet. `block` is how many bytes are checked together."""
        self.version = version
        self.is_open = False
        self._block = block
        self._clock = clock
        self._files: dict[str, _Arriving] = {}
        self._changed = Notifier()

    def add(self, name: str, fd: int, size: int) -> None:
        """A file is there, with nothing in it that counts. The descriptor stays the caller's."""
        self._files[name] = _Arriving(os.dup(fd), size)

    def checked(self, name: str, block: int) -> None:
        """The bytes of a block are right."""
        self._files[name].checked.add(block)
        self._changed.notify()

    def size_of(self, name: str) -> int | None:
        """The bytes that a file is to have; None where the version has none of that name."""
        file = self._files.get(name)
        return None if file is None else file.size

    async def has(self, name: str, start: int, count: int, *, within: float) -> bool:
        """Whether these bytes of a file are there, or come within so many seconds."""
        until = self._clock() + within
        wanted = set(range(start // self._block, -(-(start + count) // self._block)))
        while self.is_open:
            if wanted <= self._files[name].checked:
                return True
            seen = self._changed.count
            if (left := until - self._clock()) <= 0:
                break
            await self._changed.wait_after(seen, within=left)
        return False

    def opened(self, name: str) -> int:
        """A descriptor of a file, which becomes the caller's."""
        return os.dup(self._files[name].fd)

    def close(self) -> None:
        """Hand nothing on any more."""
        self.is_open = False
        while self._files:
            os.close(self._files.popitem()[1].fd)
        self._changed.notify()
