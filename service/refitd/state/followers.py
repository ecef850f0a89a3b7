"""The hosts that follow this service, as they report themselves: what each has, and what it pulls. In memory alone.

A report is good for `LEASE_SECONDS`: what a host pulls is kept so long without another report. After a restart of the
service hosts report again; one whose version was collected meanwhile hears that it is gone, and goes on.

A report that comes late counts for nothing: after a later one of its process, or after one of a later process, also
where that was heard `REMEMBERED_SECONDS` ago. So of two hosts with one name, as on machines of one host name, the one
that started last is heard, and the other is told.

While a file is being sent its version is not collected: its bytes might become another version's (slots) on the way.
"""

from collections import Counter, deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from refitd.clock import Clock
from refitd_client.contract.follow import HostReport

LEASE_SECONDS = 30.0
REMEMBERED_SECONDS = 600.0
LOOK_SECONDS = 1.0  # between two looks at which are to be forgotten
MOST = 4096  # hosts
_PAST = 8  # earlier processes of a host that are remembered


@dataclass(slots=True)
class KnownFollower:
    """A host's last report, when it came (monotonic seconds), and its earlier processes."""

    report: HostReport
    at: float
    past: deque[str] = field(default_factory=lambda: deque(maxlen=_PAST))


class TooManyFollowersError(Exception):
    """There are as many hosts as the service remembers."""


class SupersededError(Exception):
    """Another process has reported by the name since. The message is a sentence."""


class Followers:
    """The reports that are still good, and how far those of earlier hosts had come."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[str, KnownFollower] = {}
        self._looked = -LOOK_SECONDS

    def reported(self, report: HostReport) -> bool:
        """Take a host's report. Returns whether it is the newest of its process.

        Raises:
            TooManyFollowersError: it is new, and there are too many.
            SupersededError: see there.
        """
        now, name = self._clock.monotonic(), report.told.follower
        if len(self._known) >= MOST and name not in self._known:
            self._forget(now, LEASE_SECONDS)
        elif now - self._looked >= LOOK_SECONDS:  # a look at each of a thousand hosts takes a part of a report's time
            self._looked = now
            self._forget(now, REMEMBERED_SECONDS)
        before = self._known.get(name)
        if before is None:
            if len(self._known) >= MOST:
                raise TooManyFollowersError
            self._known[name] = KnownFollower(report, now)
            return True
        process = report.told.process
        if process in before.past:
            raise SupersededError(
                f"another host has reported as {name} since: give each host a name of its own, --follower"
            )
        if process != before.report.told.process:
            before.past.append(before.report.told.process)
        elif report.number <= before.report.number:
            return False
        before.report, before.at = report, now
        return True

    @property
    def known(self) -> Mapping[str, KnownFollower]:
        """By name, those whose report is still good."""
        now = self._clock.monotonic()
        return {name: known for name, known in self._known.items() if now - known.at <= LEASE_SECONDS}

    def pulled(self) -> Iterator[tuple[str, str]]:
        """Which version (its id) each host pulls, by the host's name."""
        for name, known in self.known.items():
            for version in known.report.pulls:
                yield name, version

    def _forget(self, now: float, after: float) -> None:
        for name in [name for name, known in self._known.items() if now - known.at > after]:
            del self._known[name]


class FilesSent:
    """Counts the files that are being sent, by version."""

    def __init__(self) -> None:
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
