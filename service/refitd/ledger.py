"""What is true now: versions, engines and rollouts in memory, each change written to the journal in the same order.

A change takes effect in memory at once and is durable a moment later; `durable()` waits for that. Whoever is about to
act on the world outside (answer a notice, call an engine, delete a file) waits first; nobody else has to.
Everything happens on the event loop's thread.
"""

import asyncio
import uuid
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import structlog

from refitd.bell import Bell
from refitd.catalog.places import Places
from refitd.catalog.record import VersionRecord
from refitd.clock import Clock
from refitd.journal import reads, writes
from refitd.journal.journal import Journal
from refitd.journal.origin import NEW
from refitd.known_versions import KnownVersions
from refitd.rollout.carriage import Carriage
from refitd.rollout.coming import looks_ahead
from refitd.rollout.goals import goals_of_engine, goals_of_run, in_place, on_the_way
from refitd.rollout.offers import Offer, offered_to, takers
from refitd.rollout.plan import Goals, RefitTo
from refitd.rollout.record import AttemptRecord, EngineRecord, RolloutRecord
from refitd.rollout.removed import given_back, in_mid_load, left_behind
from refitd.rollout.runs import Runs
from refitd.rollout.strategy import Strategy, StrategyName
from refitd.root_mark import RootMark
from refitd.telemetry.witness import Witness
from refitd_client.contract.states import EngineState, RolloutState, VersionState
from refitd_client.contract.wire import Event

_ALL = Strategy()

_GOALS = frozenset({VersionState.SEALED, VersionState.LOST})

# States that somebody may want to be woken for.
_GRAVE = frozenset(
    {
        VersionState.REJECTED,
        VersionState.LOST,
        EngineState.NACKED,
        EngineState.TAINTED,
        EngineState.QUARANTINED,
        EngineState.CONTESTED,
        EngineState.UNREACHABLE,
    }
)

log = structlog.get_logger("refitd")


class Ledger:
    """The service's memory. `bell` rings at each change. `versions` holds all but the deleted, which `gone` names, and
    `open` those of them that have no verdict yet; `places` says where each stands in lists.

    `targets` rings when a run's target, an engine's run or the set of engines changes: what a replica has to hear.
    `models` rings when an engine says which model it was started with, or follows another run.
    `removed` is what stays known of addresses where no engine is named any more. `away_since` is the time of day, for
    people, since when each engine that is UNREACHABLE does not answer. `runs` says which have ended, and since when
    engines follow them.
    `loading` holds the open attempt of each engine; `root_fault` says why the root cannot be listed, None while it
    can; `fleet_fault` why it is not known which engines there are; `file_fault` why the engines file cannot be
    used, so that what it said before stays in force. `disk_fault` says that what is kept does not fit the disk
    budget, and `folders_fault` which folders of the root are not taken in yet: `left_out` is their number, and
    `left_out_of` names their runs. `judging` names the versions that the catalog looks at just now. `origin` says
    whether the journal is being rebuilt.

    What copies hold is read off the disk at each start and not written down: `carriage` says which deltas engines find
    in one, or why not; `copying` names the versions that a copy is being made from. Nor is written down what trainers
    offer from their memory.

    `witnesses` hear of each change, in the order that they were added.
    """

    def __init__(self, journal: Journal, clock: Clock, strategy: Strategy = _ALL) -> None:
        """Read back what the journal knows. Blocks; call it before serving."""
        self.bell = Bell()
        self.targets = Bell()
        self.models = Bell()
        self.witnesses: list[Witness] = []
        self.clock = clock
        self.strategy = strategy
        self.journal = journal
        self.known = KnownVersions()
        self.versions, self.open = self.known.all, self.known.open
        self.places = Places()
        self.gone: set[str] = set()
        self.engines: dict[str, EngineRecord] = {}
        self.removed: dict[str, EngineRecord] = {}
        self.away_since: dict[str, str] = {}
        self.rollouts: dict[str, RolloutRecord] = {}
        self.runs = Runs()
        self.loading: dict[str, AttemptRecord] = {}
        self.root_fault: str | None = "the root has not been listed yet"
        self.fleet_fault: str | None = "the engines have not been taken in yet"
        self.file_fault: str | None = None
        self.discovery_fault: str | None = None
        self.disk_fault: str | None = None
        self.folders_fault: str | None = None
        self.left_out = 0
        self.left_out_of: frozenset[str] = frozenset()
        self.judging: set[str] = set()
        self.origin = journal.read(reads.read_origin) or NEW
        self._first_seen: dict[str, float] = {}
        self.copying: frozenset[str] = frozenset()
        self._carried: dict[str, str] = {}
        self._refused: dict[str, str] = {}
        self.carriage = Carriage(self._carried, self._refused)
        self._offers: dict[str, Offer] = {}
        self._fingerprints: dict[tuple[str, str], str] = {}
        self._goals: dict[str, Goals] = {}
        self._seq = journal.read(reads.read_last_event)
        self._rollout_number = 0
        self._read_back()

    def _read_back_versions(self) -> None:
        for version in self.journal.read(reads.read_versions):
            if version.state is VersionState.DELETED:
                self.gone.add(version.id)
            else:
                self.known.keep(version)
        for name, row in self.journal.read(reads.read_places):
            self.places.remember(name, row)
        for run in self.journal.read(reads.read_runs):
            self.runs.remember(run)

    def _read_back(self) -> None:
        self._read_back_versions()
        for version_id, configuration, fingerprint in self.journal.read(reads.read_fingerprints):
            if version_id in self.versions:
                self._fingerprints[version_id, configuration] = fingerprint
        for rollout in self.journal.read(reads.read_rollouts):
            self.rollouts[rollout.run] = rollout
            self._rollout_number = max(self._rollout_number, rollout.number)
        for engine in self.journal.read(reads.read_engines):
            # Clocks of another boot mean nothing here, and what the engine does now nobody knows yet.
            self.engines[engine.id] = replace(
                engine,
                state=EngineState.PROBING,
                unreachable_since=None,
                resume_owed=True,
                contested_at=None if engine.contested_at is None else self.clock.monotonic(),
            )
        self.runs.count(self.engines.values(), self.clock.monotonic())
        for engine in self.journal.read(reads.read_removed_engines):
            self.removed[engine.url] = replace(engine, unreachable_since=self.clock.monotonic())
        for attempt in self.journal.read(reads.read_open_attempts):
            self._taint(attempt)
        if self.origin.cause is not None and self._seq == 0:
            self.say("journal", "journal", f"rebuilding: {self.origin.cause}")

    def _taint(self, attempt: AttemptRecord) -> None:
        """Close an attempt whose process died: nobody saw how the load ended, so the contents are unknown."""
        reason = f"the service stopped in the middle of loading {attempt.version}"
        closed = replace(attempt, outcome="TAINTED", reason=reason)
        self.journal.append(writes.put_attempt(closed))
        if engine := self.engines.get(attempt.engine):
            self.put_engine(
                replace(
                    engine,
                    state=EngineState.TAINTED,
                    known=False,
                    serving=None,
                    held=engine.serving or engine.held,
                    unproven=(*engine.unproven, attempt.version),
                    reason=reason,
                    last_attempt=closed,
                ),
                f"TAINTED: {reason}",
            )

    async def durable(self) -> None:
        """Wait until every change so far is on disk.

        Raises:
            JournalError: it cannot be written just now.
        """
        await self.journal.durable()

    def put_version(self, record: VersionRecord, text: str | None = None) -> None:
        """Take a version as it is now; `text` says in the log what happened to it."""
        before = self.versions.get(record.id)
        self.journal.append(writes.put_version(record, self.places.of(record.run, record.order)))
        if before is None:
            self._first_seen[record.id] = self.clock.monotonic()
            if self._is_news(record):
                self.reopen_run(record.run, f"{record.id} came")
        if record.state is VersionState.DELETED:
            self._first_seen.pop(record.id, None)
            self.known.drop(record)
            self.gone.add(record.id)
            self._refused.pop(record.id, None)
            for key in [key for key in self._fingerprints if key[0] == record.id]:
                del self._fingerprints[key]
        else:
            self.known.keep(record)
        if before is None or _may_be_aimed_at(before) or _may_be_aimed_at(record) or self._looks_at_newest(record.run):
            self._aim(record.run)
        for witness in self.witnesses:
            witness.version_changed(before, record)
        if text is not None:
            self.say("version", record.id, text, state=record.state.value, step=record.order.step, run=record.run)
        self.bell.ring()

    def _is_news(self, record: VersionRecord) -> bool:
        """Whether a version that came says that its run goes on. A folder that waited to be taken in does not."""
        newest = self.known.newest_of(record.run)
        waited = record.run in self.left_out_of and newest is not None and record.order < newest
        return record.noticed or not waited

    def _looks_at_newest(self, run: str) -> bool:
        """Whether an engine of a run looks at its newest version before that has a verdict."""
        return any(engine.plugin is not None for engine in self.engines_of(run))

    def since_seen(self, version: str) -> float | None:
        """Milliseconds since a version came to be known; None where that was before the service started."""
        seen = self._first_seen.get(version)
        return None if seen is None else (self.clock.monotonic() - seen) * 1000

    def goals(self, run: str) -> Goals:
        """What the run's engines are to serve. Asked by every replica at every turn, so it is remembered."""
        if run not in self._goals:
            known = self.versions_of(run)
            looked_at = [*known[:1], *(version for version in known[1:] if _may_be_aimed_at(version))]
            self._goals[run] = goals_of_run(
                self.strategy, self.rollouts.get(run), looked_at, self.engines_of(run), self.carriage
            )
        return self._goals[run]

    def goals_of(self, engine: EngineRecord) -> Goals:
        """What one engine is to serve now."""
        if engine.run is None:
            return Goals()
        rollout, engines = self.rollouts.get(engine.run), self.engines_of(engine.run)
        goals = in_place(self.goals(engine.run), engine, self.versions)
        goals = goals_of_engine(goals, engine, self.strategy, rollout, engines)
        goals = on_the_way(goals, engine, self.versions)
        if not self._looks_ahead(engine, goals.coming, rollout):
            goals = replace(goals, coming=None)
        goals = replace(goals, serving=self.versions.get(engine.serving or ""))
        offer = offered_to(engine, self._offers.get(engine.run), self.versions)
        return goals if offer is None else replace(goals, offered=RefitTo(self.versions[offer.version], offer.path))

    def _looks_ahead(self, engine: EngineRecord, coming: str | None, rollout: RolloutRecord | None) -> bool:
        version = self.versions.get(coming or "")
        paused = rollout is not None and rollout.paused_since is not None
        return version is not None and looks_ahead(engine, version, self.versions, self.strategy, paused=paused)

    def engines_of(self, run: str) -> list[EngineRecord]:
        """The engines that follow a run."""
        return [engine for engine in self.engines.values() if engine.run == run]

    def _aim(self, run: str | None) -> None:
        """Look at a run's goals again; whoever follows them hears of it if they have changed."""
        if run is not None:
            before = self._goals.pop(run, None)
            if before is None or before != self.goals(run):
                self.targets.ring()

    def _take_turns(self, run: str | None) -> None:
        """Where engines go one after the other, each step of one is news to the others of its run."""
        if self.strategy.name is not StrategyName.ALL:
            self._aim(run)
            self.targets.ring()

    def carry(self, version: VersionRecord, path: str) -> None:
        """A copy at `path` holds a delta: engines may go there."""
        if self._carried.get(version.id) != path:
            self._carried[version.id] = path
            self._refused.pop(version.id, None)
            self._carriage_changed(version.run)
            self.say("version", version.id, f"can be loaded from {path}")

    def let_go(self, version: str, run: str) -> None:
        """No copy holds a version any more, or will in a moment: from here on no engine begins to load it."""
        if self._carried.pop(version, None) is not None:
            self._carriage_changed(run)

    def refuse(self, version: VersionRecord, reason: str) -> None:
        """A delta cannot be carried out: engines stay on what they have until another version comes."""
        if self._refused.get(version.id) != reason:
            self._refused[version.id] = reason
            self._carriage_changed(version.run)
            self.say("version", version.id, f"cannot be carried out: {reason}", state=version.state.value)

    def _carriage_changed(self, run: str) -> None:
        self._aim(run)
        self.bell.ring()

    def offer(self, version: VersionRecord, path: str) -> None:
        """A trainer on some engine's host has a version in memory, as the file at `path` says. It waits for answers."""
        known = self._offers.get(version.run)
        if known is not None and known.version == version.id:
            return  # whoever has answered is not asked again
        rollout = self.rollouts.get(version.run)
        paused = rollout is not None and rollout.paused_since is not None
        waiting = takers(self.strategy, self.engines_of(version.run), paused=paused)
        self._offers[version.run] = Offer(version=version.id, path=path, waiting=waiting)
        self.targets.ring()

    def is_offered(self, version: VersionRecord) -> bool:
        """Whether an engine may yet take a version from its trainer's memory."""
        offer = self._offers.get(version.run)
        if offer is None or offer.version != version.id:
            return False
        return any(offered_to(engine, offer, self.versions) is not None for engine in self.engines_of(version.run))

    def answered(self, engine: EngineRecord, version: VersionRecord) -> None:
        """An engine has taken what was offered, or has not and will not."""
        offer = self._offers.get(version.run)
        if offer is not None and offer.version == version.id:
            self._offers[version.run] = offer.answered(engine.id)
            self.bell.ring()

    async def find(self, version: str) -> VersionRecord | None:
        """A version by its id, also one that was deleted.

        Raises:
            JournalError: the journal cannot be written just now, so that it may not hold the version's end yet.
        """
        if version in self.gone:
            await self.durable()
            return await asyncio.to_thread(
                self.journal.read, lambda connection: reads.read_version(connection, version)
            )
        return self.versions.get(version)

    def versions_of(self, run: str) -> list[VersionRecord]:
        """The versions of a run, newest first."""
        return self.known.of_run(run)

    @property
    def runs_with_versions(self) -> Collection[str]:
        """The runs that a version is known of."""
        return self.known.runs

    def put_engine(self, record: EngineRecord, text: str | None = None) -> None:
        """Take an engine as it is now."""
        before = self.engines.get(record.id)
        if before == record:
            return
        if before is None or (before.run, before.startup_path) != (record.run, record.startup_path):
            self.models.ring()
        self.engines[record.id] = record
        if before is None or before.run != record.run:
            self._followers_changed(None if before is None else before.run)
        if record.state is not EngineState.UNREACHABLE:
            self.away_since.pop(record.id, None)
        elif record.id not in self.away_since:
            self.away_since[record.id] = self.clock.now()
        self._take_turns(record.run)
        if before is None or (before.run, before.serving, before.known) != (record.run, record.serving, record.known):
            self._aim(record.run)  # what engines hold stays the target when its files are lost
        self.journal.append(writes.put_engine(record))
        if before is None and record.url in self.removed:  # whose knowledge of the address the record has taken over
            self._forget(record.url)
        if text is not None:
            self.say("engine", record.id, text, state=record.state.value)
        self.bell.ring()

    def _followers_changed(self, left: str | None) -> None:
        """An engine follows another run than before, or is new; `left` is the run that it followed."""
        self.runs.count(self.engines.values(), self.clock.monotonic())
        self._take_turns(left)
        self._aim(left)
        self.targets.ring()

    def drop_engine(self, engine_id: str) -> None:
        """Forget an engine, and with it the leases that it held, but for those of loads that nobody saw the end of."""
        engine = self.engines.pop(engine_id, None)
        if engine is None:
            return
        self.runs.count(self.engines.values(), self.clock.monotonic())
        self.away_since.pop(engine_id, None)
        attempt = self.loading.get(engine_id)
        self.leave(engine if attempt is None else in_mid_load(engine, attempt.version))
        self._take_turns(engine.run)
        self._aim(engine.run)
        self.journal.append(writes.drop_engine(engine_id))
        self.say("engine", engine_id, "removed")
        self.targets.ring()
        self.bell.ring()

    def leave(self, engine: EngineRecord) -> None:
        """Take what is known of an engine that is named no more: it outlives that where it may do harm otherwise."""
        left = left_behind(engine, self.clock.monotonic())
        heir = next((each for each in self.engines.values() if each.url == engine.url), None)
        if heir is not None:
            if left is not None:  # named anew meanwhile, by another name
                self.put_engine(replace(given_back(heir, left), state=EngineState.TAINTED), f"TAINTED: {left.reason}")
        elif left is not None:
            self.removed[engine.url] = left
            self.journal.append(writes.put_engine(left))
        elif engine.url in self.removed:
            self._forget(engine.url)
        self.bell.ring()

    def _forget(self, address: str) -> None:
        del self.removed[address]
        self.journal.append(writes.drop_engine(address))

    def open_attempt(self, engine: str, version: str) -> AttemptRecord:
        """Write the intent to load. Await `durable()` before the first call to the engine."""
        attempt = AttemptRecord(id=uuid.uuid4().hex, engine=engine, version=version, started_at=self.clock.now())
        self.journal.append(writes.put_attempt(attempt))
        self.loading[engine] = attempt
        for witness in self.witnesses:
            witness.attempt_changed(attempt)
        return attempt

    def close_attempt(self, attempt: AttemptRecord) -> None:
        """Write how an attempt ended."""
        self.journal.append(writes.put_attempt(attempt))
        self.loading.pop(attempt.engine, None)
        for witness in self.witnesses:
            witness.attempt_changed(attempt)
        self.bell.ring()

    def fingerprint(self, version: str, configuration: str) -> str | None:
        """What a clean load of the version gave on an engine of this configuration."""
        return self._fingerprints.get((version, configuration))

    def record_fingerprint(self, version: str, configuration: str, fingerprint: str) -> None:
        """Remember what a clean load gave. The first record of a version stays."""
        self._fingerprints.setdefault((version, configuration), fingerprint)
        self.journal.append(writes.put_fingerprint(version, configuration, fingerprint))

    def start_rollout(self, run: str, version: str, cause: str) -> RolloutRecord:
        """Begin the way of a version to the engines of its run."""
        self._rollout_number += 1
        before = self.rollouts.get(run)
        rollout = RolloutRecord(
            number=self._rollout_number,
            run=run,
            version=version,
            cause=cause,
            started_at=self.clock.now(),
            paused_since=None if before is None else before.paused_since,
        )
        self.put_rollout(rollout, f"rollout {rollout.number} to {version}: {cause}")
        return rollout

    def put_rollout(self, record: RolloutRecord, text: str) -> None:
        """Take the newest rollout of a run as it is now."""
        self.rollouts[record.run] = record
        self._take_turns(record.run)
        self.journal.append(writes.put_rollout(record))
        for witness in self.witnesses:
            witness.rollout_changed(record)
        self.say("rollout", record.version, text, number=record.number, state=record.state.value)
        self.bell.ring()

    def end_rollout(self, record: RolloutRecord, state: RolloutState) -> None:
        """Close a rollout that a newer one replaces."""
        self.put_rollout(replace(record, state=state), f"rollout {record.number} to {record.version} is {state}")

    def pause_rollouts(self, record: RolloutRecord, *, paused: bool) -> None:
        """Let the run of `record`, its newest rollout, go no further than the last good version; or let it go on."""
        if paused is (record.paused_since is not None):
            return
        since = self.clock.now() if paused else None
        text = f"rollouts of run {record.run} {'are paused' if paused else 'go on'}"
        self.put_rollout(replace(record, paused_since=since), text)
        self.targets.ring()

    def close_run(self, run: str) -> None:
        """Somebody says that a run has ended."""
        if run not in self.runs.closed:
            self.runs.closed[run] = self.clock.now()
            self._put_run(run, f"run {run} is closed")

    def reopen_run(self, run: str, why: str) -> None:
        """A run goes on after all; nothing where it is not closed."""
        if self.runs.closed.pop(run, None) is not None:
            self._put_run(run, f"run {run} is open again: {why}")

    def _put_run(self, run: str, text: str) -> None:
        self.journal.append(writes.put_run(self.runs.record_of(run)))
        self.say("run", run, text, closed=run in self.runs.closed)
        self.bell.ring()

    def rebuilt(self) -> None:
        """The root was listed and every engine asked: what a lost journal knew is known again, as far as it can be."""
        self.origin = replace(self.origin, rebuilt=True)
        self.journal.append(writes.put_origin(self.origin))
        self.say("journal", "journal", "rebuilt: the root was listed and every engine asked; collecting begins")

    def is_about(self, root: RootMark | None) -> None:
        """Remember which root this is about."""
        if root != self.origin.root:
            self.origin = replace(self.origin, root=root)
            self.journal.append(writes.put_origin(self.origin))

    def say(self, kind: str, subject: str, text: str, **data: Any) -> None:
        """Add to the log of decisions, which is also the event stream."""
        self._seq += 1
        event = Event(seq=self._seq, at=self.clock.now(), kind=kind, subject=subject, text=text, data=data)
        self.journal.append(writes.put_event(event))
        tell = log.warning if data.get("state") in _GRAVE else log.info
        tell(text, kind=kind, subject=subject, **_named(kind, subject, data), **data)
        for witness in self.witnesses:
            witness.decided(event)
        self.bell.ring()

    @property
    def last_event(self) -> int:
        """The number of the newest event."""
        return self._seq


def _may_be_aimed_at(version: VersionRecord) -> bool:
    """Whether engines may serve it, or go there. What was found bad, or has no verdict, changes no goal of a run, but
    for what was handed over from its trainer's memory.
    """
    return version.state in _GOALS or version.handed


def _named(kind: str, subject: str, data: dict[str, Any]) -> dict[str, Any]:
    """What a line of the log is about, under the names that the tasks' own lines have it under."""
    match kind:
        case "version" | "engine":
            return {kind: subject}
        case "rollout":
            return {"version": subject, "rollout": data["number"]}
        case _:
            return {}
