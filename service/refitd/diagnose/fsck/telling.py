"""The port to whoever watches a check: what is being done, and how much of what there is to read is read."""

from typing import Protocol


class Telling(Protocol):
    """Hears how far it is. Must not raise."""

    def say(self, text: str) -> None:
        """What is being done from now on."""
        ...

    def expect(self, count: int) -> None:
        """So many bytes more are going to be read."""
        ...

    def read(self, count: int) -> None:
        """So many bytes more were read. Called in any thread."""
        ...


class Untold:
    """Nobody watches."""

    def say(self, text: str) -> None:
        """See `Telling`."""

    def expect(self, count: int) -> None:
        """See `Telling`."""

    def read(self, count: int) -> None:
        """See `Telling`."""
