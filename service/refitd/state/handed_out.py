"""What was sent to followers of each version, and which versions' files are being sent now. In memory alone.

While a file is being sent its version is not collected: its bytes might become another version's (slots) on the way.
"""

from collections import Counter, OrderedDict
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager

REMEMBERED = 64  # versions


class HandedOutBytes:
    """Counts bytes by version, of those that were asked for last."""

    def __init__(self) -> None:
        """None yet."""
        self._bytes: OrderedDict[str, int] = OrderedDict()
        self._sending: Counter[str] = Counter()

    @property
    def bytes_of(self) -> Mapping[str, int]:
        """By the id of a version."""
        return self._bytes

    @contextmanager
    def sending(self, version: str, count: int) -> Generator[None]:
        """So many bytes of a version are being sent."""
        self._bytes[version] = self._bytes.get(version, 0) + count
        self._bytes.move_to_end(version)
        while len(self._bytes) > REMEMBERED:
            self._bytes.popitem(last=False)
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
