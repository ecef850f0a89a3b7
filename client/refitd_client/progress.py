"""How far a publication is: bytes written of bytes to write, and milliseconds that its parts took."""

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
    """Adds up bytes, and reports them as they grow."""

    def __init__(self, total: int, report: Callable[[Progress], None] | None) -> None:
        """`report` is called in the publishing thread, about once a megabyte."""
        self.total = total
        self._written = 0
        self._report = report

    def add(self, count: int) -> None:
        """Count bytes that were written."""
        self._written += count
        if self._report is not None:
            self._report(Progress(written=self._written, total=self.total))


class Laps:
    """Milliseconds by name. Laps of the same name add up."""

    def __init__(self) -> None:
        """Start with none."""
        self.times: dict[str, float] = {}

    @contextmanager
    def lap(self, name: str) -> Generator[None, None, None]:
        """Count the time of the block."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.times[name] = self.times.get(name, 0.0) + (time.perf_counter() - began) * 1000
