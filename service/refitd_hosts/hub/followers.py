"""The hosts that follow this service, as they report themselves: what each has, and what it pulls. In memory alone.

A report is good for `LEASE_SECONDS`: what a host pulls is kept so long without another report. After a restart of the
service hosts report again; one whose version was collected meanwhile hears that it is gone, and goes on.

A report that comes late counts for nothing: after a later one of its process, or after one of a later process, also
where that was heard `REMEMBERED_SECONDS` ago. So of two hosts with one name, as on machines of one host name, the one
that started last is heard, and the other is told. Where the later process has been silent for `LEASE_SECONDS`, an
earlier one that goes on reporting takes the name back: at its second report, since one alone may only be late.

While a file is being sent its version is not collected: its bytes might become another version's (slots) on the way.
"""

from collections import Counter
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
_GOES_ON = 3  # reports of an earlier process that were refused: fewer may have been on the way when it ended


@dataclass(slots=True)
class _Earlier:
    """An earlier process of a host: the number of its newest report, and how many were refused, the last one when."""

    number: int
    refused: int = 0
    refused_at: float = 0.0


@dataclass(slots=True)
class KnownFollower:
    """A host's last report, when it came (monotonic seconds), and its earlier processes, the newest last."""

    report: HostReport
    at: float
    past: dict[str, _Earlier] = field(default_factory=dict[str, _Earlier])


class TooManyFollowersError(Exception):
    """There are as many hosts as the service remembers."""


class SupersededError(Exception):
    """Another process has reported by the name since. The message is a sentence. `is_first`: it is the first report
    of this process that is refused.
    """

    def __init__(self, text: str, *, is_first: bool) -> None:
        super().__init__(text)
        self.is_first = is_first


class Followers:
    """The reports that are still good, and how far those of earlier hosts had come."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[str, KnownFollower] = {}
        self._looked = -LOOK_SECONDS

    def reported(self, report: HostReport) -> bool:
        """Take a host's report. Returns whether it is the newest of its process."""
        now, name = self._clock.monotonic(), report.told.follower
        if len(self._known) >= MOST and name not in self._known:
            self._forget(now, LEASE_SECONDS)
        elif now - self._looked >= LOOK_SECONDS:  # a look at each of a thousand hosts takes a part of a report's time
            self._looked = now
            self._forget(now, REMEMBERED_SECONDS)
        known = self._known.get(name)
        if known is None:
            if len(self._known) >= MOST:
                raise TooManyFollowersError
            self._known[name] = KnownFollower(report, now)
            return True
        process, before = report.told.process, known.report
        if (earlier := known.past.get(process)) is not None:
            self._check_back(known, earlier, report, now)
            del known.past[process]
        if process != before.told.process:
            known.past[before.told.process] = _Earlier(before.number)
            for forgotten in list(known.past)[:-_PAST]:
                del known.past[forgotten]
        elif report.number <= before.number:
            return False
        known.report, known.at = report, now
        return True

    def _check_back(self, known: KnownFollower, earlier: _Earlier, report: HostReport, now: float) -> None:
        """Raise SupersededError where an earlier process of a host may not take the name back."""
        is_newer, goes_on = report.number > earlier.number, earlier.refused_at > known.at
        if is_newer and goes_on and now - known.at > LEASE_SECONDS:
            return
        if is_newer:
            earlier.number, earlier.refused, earlier.refused_at = report.number, earlier.refused + 1, now
        raise SupersededError(
            f"another host has reported as {report.told.follower} since: give each host a name of its own, --follower",
            is_first=is_newer and earlier.refused == 1,
        )

    def is_shared(self, name: str) -> bool:
        """Whether two processes report under a host's name now."""
        now, known = self._clock.monotonic(), self._known.get(name)
        if known is None or now - known.at > LEASE_SECONDS:
            return False
        return any(each.refused >= _GOES_ON and now - each.refused_at <= LEASE_SECONDS for each in known.past.values())

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


MOST_REFUSED = 256  # names whose refused reports are remembered: anybody may send one
SAID_FOR_SECONDS = 600.0


class RefusedReports:
    """Decides which refusals of reports are said: the first of its kind under a name in ten minutes."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._said: dict[tuple[str, str], float] = {}

    def is_to_be_said(self, name: str, kind: str) -> bool:
        """A report was refused: return whether that is to be said."""
        now = self._clock.monotonic()
        self._said = {each: at for each, at in self._said.items() if now - at < SAID_FOR_SECONDS}
        if (name, kind) in self._said or len(self._said) >= MOST_REFUSED:
            return False
        self._said[name, kind] = now
        return True


class FilesSent:
    def __init__(self) -> None:
        self._sending: Counter[str] = Counter()

    @contextmanager
    def sending(self, version: str) -> Generator[None]:
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
