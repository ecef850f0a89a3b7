"""The port to time. Durations come from the monotonic clock; the wall clock is for display only."""

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """What the service asks of time."""

    def monotonic(self) -> float:
        """Seconds since some fixed point, never going back."""
        ...

    def now(self) -> str:
        """The time of day in UTC, RFC 3339, for people to read."""
        ...


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def now(self) -> str:
        return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
