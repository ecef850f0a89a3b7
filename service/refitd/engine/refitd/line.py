"""What a hub and one of its hosts have said to each other last: the hub never calls, it answers reports.

Both sides repeat what is so, and nothing is said once: a report or a reply that is lost costs the time to the next.
"""

import secrets
from collections.abc import Callable
from typing import Protocol

from refitd.clock import Clock
from refitd_client.contract.follow import Following, HostReport, HostTrial, HostTrialResult

AWAY_SECONDS = 60.0  # without a report: a host at rest reports every ten
SILENT_SECONDS = 15.0  # without a report of a host that was given something to do, which reports every second


class Signal(Protocol):
    """As `refitd.state.observer.Notifier`."""

    count: int

    def notify(self) -> None: ...

    async def wait_after(self, seen: int, within: float | None = None) -> int: ...


class HostLine:
    """One host's. `heard` is notified of each of its reports."""

    def __init__(
        self, name: str, clock: Clock, heard: Signal, as_known: Callable[[Following], Following] = lambda told: told
    ) -> None:
        """Nothing was said yet.

        Args:
            name: the host's.
            clock: the time.
            heard: notified of each report.
            as_known: leaves out of what a host says what this service does not have. A version may come to be known
                between two reports, so the last one is looked at again each time.
        """
        self.name = name
        self.clock = clock
        self.heard = heard
        self._as_known = as_known
        self._told: Following | None = None
        self.serve: dict[str, str | None] = {}
        self.again = 0
        self.trial: HostTrial | None = None
        self.tried: HostTrialResult | None = None
        self._heard_at = 0.0
        self._is_lost = False

    def take(self, report: HostReport) -> None:
        """The host has reported."""
        self._told, self.tried = report.told, report.tried
        self._heard_at, self._is_lost = self.clock.monotonic(), False
        self.heard.notify()

    @property
    def told(self) -> Following | None:
        """What the host said last, as far as this service knows of it now; None before its first report."""
        return None if self._told is None else self._as_known(self._told)

    @property
    def here(self) -> Following | None:
        """What the host said last; None where it has not reported for too long."""
        is_away = self._is_lost or self.clock.monotonic() - self._heard_at > AWAY_SECONDS
        return None if is_away else self.told

    async def next(self) -> Following | None:
        """What the host says next; None where it says nothing for too long, and then it counts as away."""
        seen = self.heard.count
        await self.heard.wait_after(seen, within=SILENT_SECONDS)
        if self.heard.count == seen:
            self._is_lost = True
            self.serve = {}  # where it comes back much later, something else may be right by then
            return None
        return self.told

    def order(self, run: str, version: str | None, *, again: bool = False) -> None:
        """Say from now on that the host is to serve a version. `again`: that it is to load it though it serves it."""
        self.serve = {run: version}
        self.again = 1 + secrets.randbelow(2**52) if again else 0

    def ask(self, label: str) -> int:
        """Ask from now on for a trial of a version; the question's number."""
        self.trial = HostTrial(number=1 + secrets.randbelow(2**52), label=label)
        return self.trial.number
