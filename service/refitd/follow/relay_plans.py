"""The hub's side of relays: from the followers' reports it makes the plan who pulls from whom, and answers with it.

    report      of a follower that pulls: is it new, did it say that another gave wrong bytes, or nothing?
    plan        `policy/relays.py`, anew where something has changed
    answer      whom to pull the version's stripes from

A follower that is said to have given wrong bytes is not named again to anyone until its process is another. One that
did not give what it was asked for is not named again to who said so, and to others not until it has reported again.

A follower is silent that has not reported for some time, or not since others began to pull what is new: each reports
when it begins to pull. A silent one may be dead, and gets the last place (`policy/relays.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from refitd.policy.relays import Parents, RelayHost, home_of, hub_serves, plan_relays
from refitd.state.followers import LEASE_SECONDS, Followers
from refitd.state.store import Store
from refitd_client.contract.follow import FollowerReport, Relay, RelayedFollower
from refitd_client.contract.naming import Order, parse_version_id

SILENT_SECONDS = LEASE_SECONDS / 2  # without a report, where followers report three times in a lease
HEARD_SECONDS = 1.0  # in which a follower that lives says that it pulls what others pull
_MOST_WRONG = 1000  # processes that are remembered
Answer = tuple[Relay | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a follower's process stands. `home` as in `RelayHost`."""

    process: str
    url: str | None
    zone: str
    run: str | None
    number: int
    home: int | None


class RelayPlans:
    """The plans, by run. `children` is how many followers each may have that pull from it; 0: nobody hands on."""

    def __init__(self, followers: Followers, store: Store, children: int) -> None:
        """None yet."""
        self.children = children
        self._followers = followers
        self._store = store
        self._places: dict[str, _Place] = {}
        self._came = 0
        self._wrong: dict[str, str] = {}
        self._complaints: dict[tuple[str, str], float] = {}  # who lacks what process, since when
        self._newest: dict[str | None, tuple[Order, float]] = {}  # what is pulled, by run, and since when
        self._silent: frozenset[str] = frozenset()  # when the plan was made
        self._refused: dict[str, tuple[str, float]] = {}  # to whom which version, since when
        self._is_old = True
        self._plans: dict[str | None, dict[str, Parents]] = {}

    def answer(self, report: FollowerReport) -> Mapping[str, Answer]:
        """From whom a follower that has just reported pulls what it pulls."""
        if not self.children:
            return {}
        self._forget()
        self._place(report)
        self._hear(report)
        self._begins(report)
        if not report.pulls:
            return {}
        if self._is_old:
            self._plan()
        named = tuple(map(self._relay, self._plans[report.run][report.follower]))
        return dict.fromkeys(report.pulls, named) if any(named) else {}

    def serves(self, follower: str, version: str, copies: float) -> bool:
        """Whether this service itself gives a follower blocks of a version, of which it has sent so many copies.

        A follower that is refused has a relay for each stripe, and asks those; after some seconds it is served.
        """
        place = self._places.get(follower)
        parents = None if place is None else self._plans.get(place.run, {}).get(follower)
        if parents is None:
            return True
        now, (refused, since) = self._store.clock.monotonic(), self._refused.get(follower, ("", 0.0))
        if hub_serves(parents, copies, now - since if refused == version else None):
            return True
        if refused != version:
            self._refused[follower] = version, now
        return False

    def shown(self) -> list[RelayedFollower]:
        """Every follower's place, for people."""
        self._forget()
        if self._is_old:
            self._plan()
        return [self._shown(name) for name in sorted(self._places)]

    def _shown(self, name: str) -> RelayedFollower:
        place = self._places[name]
        parents = self._plans[place.run][name]
        return RelayedFollower(
            follower=name,
            run=place.run,
            zone=place.zone,
            url=place.url,
            home=place.home,
            parents=list(parents),
            why_not=self._why_not(name),
        )

    def _why_not(self, name: str) -> str | None:
        place = self._places[name]
        if place.process in self._wrong:
            return self._wrong[place.process]
        if place.home is None:
            return "it has no --advertise, so that others cannot reach it"
        if not self._answers(name):
            return "another follower did not get from it what it asked for"
        return "it has not reported when it should have" if self._is_silent(name) else None

    def _relay(self, name: str | None) -> Relay | None:
        place = None if name is None else self._places[name]
        return None if place is None or place.url is None else Relay(url=place.url, process=place.process)

    def _forget(self) -> None:
        """Drop followers whose leases have ended."""
        known = self._followers.known
        if gone := self._places.keys() - known.keys():
            for name in gone:
                del self._places[name]
                self._refused.pop(name, None)
            self._complaints = {key: at for key, at in self._complaints.items() if key[0] in known}
            self._is_old = True
            self._tell()

    def _place(self, report: FollowerReport) -> None:
        """Give a new follower, or a new process of one, the last place; in another run it keeps its number."""
        known = self._places.get(report.follower)
        facts = (report.process, report.url, report.zone)
        is_same = known is not None and facts == (known.process, known.url, known.zone)
        if known is not None and is_same and known.run == report.run:
            return
        self._places.pop(report.follower, None)
        reachable = report.url is not None and bool(report.process)
        self._came += 1
        self._places[report.follower] = _Place(
            process=report.process,
            url=report.url,
            zone=report.zone,
            run=report.run,
            number=known.number if known is not None and is_same else self._came,
            home=home_of(report.zone, self._hosts(report.run), self.children) if reachable else None,
        )
        self._is_old = True
        self._tell()

    def _hear(self, report: FollowerReport) -> None:
        """Take what a follower says of others; its own report shows that it is there itself."""
        me = report.follower
        for process, why in report.wrong.items():
            self._distrust(me, process, why)
        told = {key for key in self._complaints if key[0] == me}
        now = {(me, process) for process in report.lost}
        if told != now:
            at = self._followers.known[me].at
            self._complaints = {key: since for key, since in self._complaints.items() if key not in told - now}
            self._complaints.update(dict.fromkeys(now - told, at))
            self._is_old = True
        if any(process == report.process for _, process in self._complaints):
            self._is_old = True

    def _begins(self, report: FollowerReport) -> None:
        """Note since when the newest version is pulled, and that one that was silent is there."""
        pulled = [parsed[1] for parsed in map(parse_version_id, report.pulls) if parsed is not None]
        known = self._newest.get(report.run)
        if pulled and (known is None or max(pulled) > known[0]):
            self._newest[report.run] = max(pulled), self._followers.known[report.follower].at
            self._is_old = True
        if report.follower in self._silent:
            self._is_old = True

    def _is_silent(self, name: str) -> bool:
        """Whether it has not reported for some time, or not since others began to pull what is new."""
        at, now = self._followers.known[name].at, self._store.clock.monotonic()
        _, began = self._newest.get(self._places[name].run, (None, at))
        return now - at > SILENT_SECONDS or (at < began and now - began > HEARD_SECONDS)

    def _distrust(self, by: str, process: str, why: str) -> None:
        name = next((name for name, place in self._places.items() if place.process == process), None)
        if process in self._wrong or name is None or len(self._wrong) >= _MOST_WRONG:
            return
        self._wrong[process] = f"follower {name} at {self._places[name].url} gave follower {by} wrong bytes: {why}"
        self._store.say("follower", name, self._wrong[process], is_fault=True)
        self._is_old = True
        self._tell()

    def _tell(self) -> None:
        """Set the fault of relays, or clear it: of those that are still the process that gave wrong bytes."""
        found = [self._wrong[place.process] for place in self._places.values() if place.process in self._wrong]
        self._store.faults.set_relays("; ".join(sorted(found)) or None)

    def _answers(self, name: str) -> bool:
        """Whether it has reported since another said last that it gave nothing."""
        process, at = self._places[name].process, self._followers.known[name].at
        return not any(of == process and since >= at for (_, of), since in self._complaints.items())

    def _hosts(self, run: str | None) -> list[RelayHost]:
        return [self._host(name) for name, place in self._places.items() if place.run == run]

    def _host(self, name: str) -> RelayHost:
        place = self._places[name]
        lost = {process for by, process in self._complaints if by == name}
        return RelayHost(
            name=name,
            number=place.number,
            home=place.home,
            zone=place.zone,
            is_used=place.process not in self._wrong and self._answers(name),
            is_silent=self._is_silent(name),
            avoids=frozenset(each for each, other in self._places.items() if other.process in lost)
            if lost
            else frozenset(),
        )

    def _plan(self) -> None:
        runs = {place.run for place in self._places.values()}
        self._plans = {run: plan_relays(self._hosts(run), self.children, self._plans.get(run)) for run in runs}
        self._silent = frozenset(filter(self._is_silent, self._places))
        self._is_old = False
