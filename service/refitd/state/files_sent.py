"""Which versions' files are being sent now. In memory alone.

While a file is being sent its version is not collected: its bytes might become another version's (slots) on the way.
"""

from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager


class FilesSent:
    """Counts the files that are being sent, by version."""

    def __init__(self) -> None:
        """None yet."""
        self._sending: Counter[str] = Counter()

    @contextmanager
    def sending(self, version: str) -> Generator[None]:
        """A part of a version's file is being sent."""
        self._sending[version] += 1
        try:
            yield
        finally:
            self._sending[version] -= 1
            self._sending += Counter()  # without those at zero

    def in_use(self) -> Iterator[tuple[str, str]]:
        """Who reads which version (its id), as `Followers.pulled`."""
        for version in self._sending:
            yield "that asked for a part", version
