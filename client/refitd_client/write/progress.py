"""How far a publication is: bytes written of bytes to write, and milliseconds that its parts took."""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Bytes of the version's files that were written so far, and how many there will be."""

    written: int
    total: int


class Meter:
    """Adds up bytes from any thread, and reports them as they grow in the one that made it."""

    def __init__(self, total: int, callback: Callable[[Progress], None] | None) -> None:
        """`callback` is called in this thread, about once a megabyte if it is this thread that writes."""
        self.total = total
        self._written = 0
        self._reported = 0
        self._callback = callback
        self._thread = threading.get_ident()
        self._turn = threading.Lock()

    @property
    def is_watched(self) -> bool:
        """Whether there is a callback."""
        return self._callback is not None

    def add(self, count: int) -> None:
        """Count bytes that were written."""
        if self._callback is not None:
            with self._turn:
                self._written += count
            self.report()

    def report(self) -> None:
        """Report what was counted since the last time, if this is the thread for it."""
        if self._callback is None or self._written == self._reported or threading.get_ident() != self._thread:
            return
        self._reported = self._written
        self._callback(Progress(written=self._reported, total=self.total))


class Laps:
    """Milliseconds by name. Laps of the same name add up."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self.times: dict[str, float] = {}
        self._turn = threading.Lock()

    @property
    def since_begin(self) -> float:
        """Milliseconds since this was made: laps of several threads add up to more."""
        return (time.perf_counter() - self._began) * 1000

    @contextmanager
    def lap(self, name: str) -> Generator[None, None, None]:
        """Count the time of the block."""
        began = time.perf_counter()
        try:
            yield
        finally:
            took = (time.perf_counter() - began) * 1000
            with self._turn:
                self.times[name] = self.times.get(name, 0.0) + took
