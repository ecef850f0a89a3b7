"""The followers of this service, as they report themselves: what each has, and what it pulls. In memory alone.

A report is good for `LEASE_SECONDS`: what a follower pulls is kept so long without another report. After a restart of
the service followers report again; one whose version was collected meanwhile hears that it is gone, and goes on.

Two followers that have one name, as on two hosts of one host name, are found out: both report by turns. What either
pulls is kept all the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from refitd.clock import Clock
from refitd_client.contract.follow import FollowerReport

LEASE_SECONDS = 30.0
MOST = 4096  # followers


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFollower:
    """A follower's last report, and when it came (monotonic seconds, and RFC 3339 for display)."""

    report: FollowerReport
    at: float
    heard_at: str


class TooManyFollowersError(Exception):
    """There are as many followers as the service remembers."""


class Followers:
    """The reports that are still good."""

    def __init__(self, clock: Clock) -> None:
        """None yet."""
        self._clock = clock
        self._known: dict[str, KnownFollower] = {}
        self._processes: dict[tuple[str, str], KnownFollower] = {}  # by name and process
        self._doubled: set[str] = set()  # names

    def reported(self, report: FollowerReport) -> str | None:
        """Take a follower's report. Returns a sentence when it turns out that another one has its name.

        Raises:
            TooManyFollowersError: it is new, and there are too many.
        """
        now = self._clock.monotonic()
        self._forget(now)
        if report.follower not in self._known and len(self._known) >= MOST:
            raise TooManyFollowersError
        name, before = report.follower, self._known.get(report.follower)
        is_back = (name, report.process) in self._processes
        told = KnownFollower(report=report, at=now, heard_at=self._clock.now())
        self._known[name] = told
        if is_back or len(self._processes) < 2 * MOST:
            self._processes[name, report.process] = told
        if before is None or before.report.process == report.process or not is_back or name in self._doubled:
            return None
        self._doubled.add(name)
        urls = sorted({str(each.url) for each in (before.report, report)} - {"None"})
        at = f" (at {' and '.join(urls)})" if urls else ""
        return f"two followers call themselves {name}{at}: give each a name of its own, --follower"

    @property
    def known(self) -> Mapping[str, KnownFollower]:
        """By name, those whose report is still good."""
        self._forget(self._clock.monotonic())
        return self._known

    def pulled(self) -> Iterator[tuple[str, str]]:
        """Which version (its id) each follower pulls, by the follower's name."""
        self._forget(self._clock.monotonic())
        for (name, _), known in self._processes.items():
            for version in known.report.pulls:
                yield name, version

    def _forget(self, now: float) -> None:
        for name in [name for name, known in self._known.items() if now - known.at > LEASE_SECONDS]:
            del self._known[name]
            self._doubled.discard(name)
        for key in [key for key, known in self._processes.items() if now - known.at > LEASE_SECONDS]:
            del self._processes[key]
