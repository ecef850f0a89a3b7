"""Hosts that report to this service as their upstream: each is taken as one engine, and the replies say what it serves.

A host stays an engine for `GONE_SECONDS` after its last report, also over a restart of the service, and then goes. It
is called by nobody: its URL in the records is `host:` and its name.

Which hosts may pull from this service now, and which wait for their turn.

A host says with each report what it pulls, from where, or that it waits; the reply says how many are before it. Nothing
is said once. A place is held by who says so: a host that says nothing for `SILENT_SECONDS` has none any more, and after
a restart of this service those that pull hold theirs again by what they report. A host that was let in and has not
heard it is told again.

A host that lacks what it is to serve comes before one that pulls ahead; of these the one that has waited longest. Hosts
whose turn is near report every second. A free place waits for them, and for no others: where none of them is there, the
first that reports gets it. A place is kept for all that a host lacks of what it is to serve, as a delta and its base.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from refitd.clock import Clock
from refitd.engine.address import check_engine_id
from refitd.engine.plugin import Leads
from refitd.engine.port import EnginePort
from refitd.engine.registry import EngineSpec
from refitd.state.observer import Notifier
from refitd.state.records import Source
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd_client.contract.follow import Following, HostPull, HostReply, HostReport
from refitd_client.contract.states import EngineState
from refitd_client.contract.stores import is_bucket_url
from refitd_hosts.hub.engine import SILENT_SECONDS, HostLine, RefitdEngine, of_these
from refitd_hosts.hub.followers import LEASE_SECONDS, RefusedReports
from refitd_hosts.policy.hosts import stands_of, unknown_at_hub

PLACES = 4  # so that the link is full while one host checks what it has, and the next one hears of its turn
# A host hears of its turn up to a second late: of small versions so many are pulled at a time that a link of 40 Gbit/s,
# and not that second, decides how long they take.
PLACE_BYTES = 8 * 2**30
PLACE_SECONDS = 600.0  # after which a place counts no more: a host that lies, or is slow, holds no others up for long

TURNS_LOOK_SECONDS = 1.0  # between two looks at who has fallen silent


@dataclass(slots=True, kw_only=True)
class _Asking:
    """A host that waits: since when, when it was heard last (monotonic seconds), whether it waits now, and whether it
    was told that its turn is near.
    """

    since: float
    heard: float
    is_needed: bool
    waits: bool = True
    is_near: bool = False


@dataclass(slots=True, kw_only=True)
class _Place:
    version: str
    since: float
    heard: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnGiven:
    """How many hosts pull before one that wants to, 0 where it may pull; `is_near`: its turn comes within the next."""

    ahead: int = 0
    is_near: bool = False


class PullTurns:
    """The hosts that pull, and those that wait. In memory alone."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._places: dict[str, _Place] = {}
        self._asking: dict[str, _Asking] = {}
        self._looked = 0.0

    def reported(self, told: Following, *, is_needed: bool, size: int | None) -> TurnGiven:
        """Take what a host says, and say whether it may pull.

        Args:
            is_needed: whether it lacks what it is to serve.
            size: bytes of what it pulls or waits for; None where they are not known.
        """
        name, version, now = told.follower, told.pulling, self._clock.monotonic()
        self._forget(now)
        if version is None or is_bucket_url(told.source):
            self._left(name)
            return TurnGiven()
        place = self._places.get(name)
        if told.ahead is None and place is None:  # this service was started again, or the host is of an earlier release
            place = self._places[name] = _Place(version=version, since=now, heard=now)
            self._asking.pop(name, None)
        if place is not None and (told.ahead is None or is_needed or place.version == version):
            place.version, place.heard = version, now
            return TurnGiven()
        self._places.pop(name, None)
        mine = self._asking.setdefault(name, _Asking(since=now, heard=now, is_needed=is_needed))
        mine.heard, mine.waits, mine.is_needed = now, True, is_needed
        return self._turn(name, version, now, places_for(size))

    def _turn(self, name: str, version: str, now: float, places: int) -> TurnGiven:
        mine = self._asking[name]
        taken = sum(now - place.since <= PLACE_SECONDS for place in self._places.values())
        key = (not mine.is_needed, mine.since)
        before = [each for each in self._asking.values() if each.waits and (not each.is_needed, each.since) < key]
        if taken + sum(each.is_near or each.is_needed > mine.is_needed for each in before) < places:
            del self._asking[name]
            self._places[name] = _Place(version=version, since=now, heard=now)
            return TurnGiven()
        mine.is_near = taken + len(before) < 2 * places
        return TurnGiven(ahead=taken + len(before), is_near=mine.is_near)

    def _left(self, name: str) -> None:
        """It pulls nothing from here. It has waited since it began to, if it soon waits for another version."""
        self._places.pop(name, None)
        if (asking := self._asking.get(name)) is not None:
            asking.waits = asking.is_near = False

    def _forget(self, now: float) -> None:
        if now - self._looked < TURNS_LOOK_SECONDS:
            return
        self._looked = now
        for known in (self._places, self._asking):
            for name in [name for name, each in known.items() if now - each.heard > SILENT_SECONDS]:
                del known[name]


def places_for(size: int | None) -> int:
    """How many hosts may pull at a time, by the bytes of a version."""
    return PLACES if not size else max(PLACES, PLACE_BYTES // size)


GONE_SECONDS = 600.0
HOSTS_LOOK_SECONDS = 5.0
SCHEME = "host:"
HOST_KIND = "refitd"  # no setting names one
REPORTS_A_SECOND = 200  # of all hosts that are at something
MOST_BUSY_SECONDS = 5.0  # so that three reports get lost before a host counts as silent


def host_spec(name: str, run: str | None) -> EngineSpec:
    """A host as an engine. It has no address, so that its URL is none that a setting could name."""
    return EngineSpec.model_construct(url=f"{SCHEME}{name}", id=name, run=run, engine=HOST_KIND)


class NameTakenError(Exception):
    """An engine that is no host has the name."""


@dataclass(slots=True)
class _Reported:
    """An engine as its first report names it, and when (monotonic seconds) the last one came."""

    spec: EngineSpec
    at: float


class ReportedHosts:
    """The hosts that have reported, and the line to each."""

    def __init__(self, store: Store, clock: Clock, leads: Leads | None) -> None:
        """Do nothing yet.

        Args:
            leads: the name and the epoch by which hosts know this service; None where it has none.
        """
        self._store = store
        self._clock = clock
        self._leads = leads
        self._known: dict[str, _Reported] = {}
        self._lines: dict[str, HostLine] = {}
        self._turns = PullTurns(clock)
        self._refused = RefusedReports(clock)
        self.is_shared: Callable[[str], bool] = lambda _: False  # whether two hosts report by a name
        self.tell: Callable[[dict[str, EngineSpec]], None] = lambda _: None  # hears which hosts there are
        self.store_with: Callable[[str, str], str] = lambda _id, _digest: ""  # the store that has a version's contents

    def connector(
        self, others: Callable[[EngineSpec], EnginePort], *, root: str, load_timeout: float
    ) -> Callable[[EngineSpec], EnginePort]:
        """What makes the adapter of a host, and leaves the other engines to `others`. `root`: hosts' versions are named
        by their paths in this folder.
        """

        def connect(spec: EngineSpec) -> EnginePort:
            if spec.engine != HOST_KIND:
                return others(spec)
            return RefitdEngine(self.line(spec.id or ""), root=root, load_timeout=load_timeout)

        return connect

    def line(self, name: str) -> HostLine:
        return self._lines.setdefault(name, HostLine(name, self._clock, Notifier(), self._as_known))

    def reported(self, report: HostReport, *, is_newest: bool) -> HostReply:
        """A host has reported: take it as an engine, if it has engines and does not decide for itself.

        Args:
            is_newest: whether it says more than what was heard before.

        Raises:
            NameTakenError: see there.
            InvalidNameError: its name cannot be an engine's.
        """
        name, (leader, epoch) = check_engine_id(report.told.follower), self.leader
        if report.freely:
            return self._with_turn(HostReply(lease_seconds=LEASE_SECONDS), report, [report.told.desired])
        line, record = self.line(name), self._store.engines.get(name)
        if record is not None and record.naming.source is not Source.REPORTED:
            raise NameTakenError(
                f"engine {name} of this service has the host's name: give the host another, --follower"
            )
        if is_newest:
            line.take(report)
        known = self._known.get(name)
        if known is not None:
            known.at = self._clock.monotonic()
        elif report.told.host is not None and report.told.host.count:
            self._known[name] = _Reported(host_spec(name, report.told.run), self._clock.monotonic())
            self._tell()
        reply = HostReply(
            lease_seconds=LEASE_SECONDS,
            serve=dict(line.serve),
            again=line.again,
            leader=leader,
            epoch=max([epoch, *(had[name][1] for had in self._store.runs.left.values() if name in had)]),
            told_by=""
            if self._leads is None
            else f"the refitd of {self._leads.owner.root} on {self._leads.owner.host}",
            trial=line.trial,
            soon=record is None
            or record.state in {EngineState.PROBING, EngineState.UPDATING}
            or line.trial is not None,
        )
        return self._with_turn(reply, report, line.serve.values())

    def refuse(self, name: str, kind: str, why: str) -> bool:
        """A report by a host's name was refused for a reason of this kind: return whether that is to be said."""
        if (line := self._lines.get(name)) is not None:
            line.refuse(why)
        return self._refused.is_to_be_said(name, kind)

    def forget(self, name: str) -> None:
        """Let go of a host until it reports again. Its line stays: its engine's task may not have ended by then."""
        if self._known.pop(name, None) is not None:
            self._tell()

    def _with_turn(self, reply: HostReply, report: HostReport, serve: Iterable[str | None]) -> HostReply:
        """The reply with how to pull what the host wants to pull, and how soon the next report is wanted. `serve`: the
        ids of what it is to serve.
        """
        version = self._store.versions.get(report.told.pulling or "")
        is_needed = any(each is not None and each not in report.holds for each in serve)
        turn = self._turns.reported(
            report.told, is_needed=is_needed, size=None if version is None else version.files.bytes
        )
        busy_seconds = min(MOST_BUSY_SECONDS, max(1.0, len(self._known) / REPORTS_A_SECOND))
        return replace(
            reply,
            pull=None if report.told.pulling is None else self._how_to_pull(report.told.pulling, version, turn),
            soon=reply.soon or turn.is_near,
            busy_seconds=1.0 if turn.is_near else busy_seconds,
        )

    def _how_to_pull(self, id_: str, version: VersionRecord | None, turn: TurnGiven) -> HostPull:
        digest = None if version is None else version.digest
        return HostPull(version=id_, ahead=turn.ahead, store="" if digest is None else self.store_with(id_, digest))

    def _as_known(self, told: Following) -> Following:
        """What a host says, without what this service does not have."""
        unknown = None
        if told.run is not None and self._store.faults.root is None:  # before it was listed, what there is may come
            known = self._store.newest_known(told.run, told.follower, stands_of(told))
            unknown = unknown_at_hub(told, known, self._digest_of)
        host = told.host
        if host is not None:
            host = replace(host, unknown=unknown, shares_name=self.is_shared(told.follower))
        return of_these(replace(told, host=host), self._digest_of)

    def _digest_of(self, version: str) -> str | None:
        known = self._store.versions.get(version)
        if known is None:
            return None
        # Without a verdict nobody knows whether a host has the same: it must not count as served when that comes.
        return "" if known.digest is None and known.state.is_open else known.digest

    @property
    def leader(self) -> tuple[str, int]:
        """The name by which hosts know this service, "" where it has none, and the epoch of its lead."""
        return ("", 0) if self._leads is None else (self._leads.owner.service, self._leads.owner.epoch)

    async def run(self) -> None:
        now = self._clock.monotonic()
        for record in self._store.engines.values():
            if record.naming.source is Source.REPORTED and record.url == f"{SCHEME}{record.id}":
                said = record.naming.said if record.naming.moved else record.run if record.naming.run_named else None
                self._known.setdefault(record.id, _Reported(host_spec(record.id, said), now))
        self._tell()
        while True:
            await asyncio.sleep(HOSTS_LOOK_SECONDS)
            now = self._clock.monotonic()
            gone = [name for name, known in self._known.items() if now - known.at > GONE_SECONDS]
            for name in gone:
                del self._known[name]
                self._lines.pop(name, None)
            if gone:
                self._tell()

    def _tell(self) -> None:
        self.tell({name: known.spec for name, known in self._known.items()})
