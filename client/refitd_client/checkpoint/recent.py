"""What was found last by its key, within bounds; what was longest not asked for goes first. Threads may share it."""

from collections.abc import Hashable
from threading import Lock
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """At most so many, and together at most so heavy. What alone is heavier is not kept."""

    def __init__(self, most: int, heaviest: int = 0) -> None:
        self._most, self._heaviest = most, heaviest
        self._kept: dict[K, tuple[V, int]] = {}  # in the order in which they were asked for
        self._weight = 0
        self._lock = Lock()

    def get(self, key: K) -> V | None:
        """None where it is not kept, or not any more."""
        with self._lock:
            found = self._kept.pop(key, None)
            if found is None:
                return None
            self._kept[key] = found
            return found[0]

    def put(self, key: K, value: V, weight: int = 0) -> None:
        """Keep it, in place of what was kept under its key."""
        with self._lock:
            self._drop(key)
            if weight > self._heaviest:
                return
            self._kept[key] = value, weight
            self._weight += weight
            while len(self._kept) > self._most or self._weight > self._heaviest:
                self._drop(next(iter(self._kept)))

    def _drop(self, key: K) -> None:
        _, weight = self._kept.pop(key, (None, 0))
        self._weight -= weight
