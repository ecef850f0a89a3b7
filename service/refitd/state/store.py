"""What is true now: versions, engines and updates in memory, each change written to the journal in the same order.

A change takes effect in memory at once and is durable a moment later; `durable()` waits for that. A caller waits for it
before it acts outside the service (answers a notice, calls an engine, deletes a file).
Everything happens on the event loop's thread.
"""

import asyncio
import uuid
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

import structlog

from refitd.clock import Clock
from refitd.root.ownership import RootMark
from refitd.state import records
from refitd.state.faults import InputFaults
from refitd.state.journal import rows
from refitd.state.journal.journal import Journal
from refitd.state.observer import Notifier, Observer, named, run_of, severity_of
from refitd.state.records import (
    NEW,
    AttemptRecord,
    EngineRecord,
    UpdateRecord,
    given_back,
    in_mid_load,
    interrupted,
    left_behind,
)
from refitd.state.version import VersionRecord
from refitd.state.version_index import EngineIndex, Runs, VersionIndex
from refitd_client.contract.naming import parse_version_id, version_folder
from refitd_client.contract.naming import version_id as id_of
from refitd_client.contract.states import EngineState, Kind, LogSeverity, VersionState
from refitd_client.contract.wire import Event

RecordT = TypeVar("RecordT")
log = structlog.get_logger("refitd")


class Store:
    """What the service knows. Other parts read it and call its methods; only these change it."""

    def __init__(self, journal: Journal, clock: Clock, epoch: int = 0) -> None:
        """Read back what the journal knows. Blocks; call it before serving. `epoch` is that of the lead under which it
        writes; 0 of a service alone.
        """
        self.epoch, self.clock, self.journal = epoch, clock, journal
        self.changed = Notifier()
        self.models_changed = Notifier()  # when an engine says with which model it was started, or follows another run
        self._observers: list[Observer] = []
        self.index = VersionIndex()
        self.versions, self.open = (
            self.index.all,
            self.index.open,
        )  # by id: all but the deleted; those without a verdict
        self.gone: set[str] = set()  # ids of the deleted versions
        self.engines = EngineIndex()
        self.removed: dict[str, EngineRecord] = {}  # by the addresses where no engine is named any more
        self.away_since: dict[str, str] = {}  # of each UNREACHABLE engine, RFC 3339
        self.updates: dict[str, UpdateRecord] = {}  # the newest of each run
        self.runs = Runs()
        self.loading: dict[str, AttemptRecord] = {}  # the open attempt of each engine
        self.faults = InputFaults()
        self.origin = journal.read(rows.read_origin) or NEW
        self._first_seen: dict[str, float] = {}
        self._fingerprints: dict[tuple[str, str], str] = {}
        self.last_event = journal.newest_event = journal.read(rows.read_last_event)
        self._update_number = 0
        for version in journal.read(rows.read_versions):
            if version.state is VersionState.DELETED:
                self.gone.add(version.id)
                self.index.drop(version)
            else:
                self.index.keep(version)
        for run in self._records(records.RunRecord):
            self.runs.remember(run)
        for found in self._records(records.FingerprintRecord):
            if found.version in self.versions:
                self._fingerprints[found.version, found.configuration] = found.fingerprint
        for update in journal.read(rows.read_updates):
            self.updates[update.run] = update
            self._update_number = max(self._update_number, update.number)
        self._read_engines()

    def _records(self, kind: type[RecordT]) -> list[RecordT]:
        return self.journal.read(lambda connection: rows.read_records(connection, kind))

    def _read_engines(self) -> None:
        for engine in self._records(EngineRecord):
            if engine.naming.removed:
                self.removed[engine.url] = engine.having(unreachable_since=self.clock.monotonic())
                continue
            # Clocks of another boot mean nothing here, and what the engine does now is not known yet. A host that was
            # away delays nobody while it is awaited.
            stays_away = engine.pulls and engine.state is EngineState.UNREACHABLE
            if stays_away:
                self.away_since[engine.id] = self.clock.now()
            self.engines[engine.id] = engine.having(
                state=EngineState.UNREACHABLE if stays_away else EngineState.PROBING,
                unreachable_since=None,
                resume_owed=not engine.pulls,  # a host resumes its engines by itself
                contested_at=None if engine.trouble.contested_at is None else self.clock.monotonic(),
            )
        self.runs.count(self.engines.values(), self.clock.monotonic())
        for attempt in self.journal.read(rows.read_open_attempts):  # of a process that died
            closed, after = interrupted(attempt, self.engines.get(attempt.engine))
            self.journal.append(rows.put(closed))
            if after is not None:
                self.put_engine(after, f"{closed.outcome}: {closed.reason}")
        for run in self.runs.deleted:
            self._retire_deleted(run)
        if self.origin.cause is not None and self.last_event == 0:  # of a root that was in use before refitd came
            self.say("journal", "journal", f"rebuilding: {self.origin.cause}", is_fault=True)

    def observe(self, *observers: Observer, first: bool = False) -> None:
        """Call observers with each change from here on, in the order in which they were added, or `first`."""
        at = 0 if first else len(self._observers)
        self._observers[at:at] = observers

    async def durable(self) -> None:
        """Wait until every change so far is on disk. A JournalError says that it cannot be written just now."""
        await self.journal.durable()

    def put_version(self, record: VersionRecord, text: str | None = None) -> None:
        """Put a version as it is now; `text` says in the log what happened to it."""
        before = self.versions.get(record.id) or self.index.deleted(record)
        self.journal.append(rows.put(record))
        if before is None:
            self._first_seen[record.id] = self.clock.monotonic()
            # A folder that only now got its turn to be taken in does not open a closed run again.
            newest = self.index.newest_of(record.run)
            waited = record.run in self.faults.runs_left_out and newest is not None and record.order < newest
            if record.announced.noticed or not waited:
                self.reopen_run(record.run, f"{record.id} came")
        if record.state is VersionState.DELETED:
            self._first_seen.pop(record.id, None)
            self.index.drop(record)
            self.gone.add(record.id)
            self.forget_fingerprints(record.id)  # a hub that has lost its root may give the name to other contents
        else:
            self.index.keep(record)
            self.gone.discard(record.id)  # a follower has pulled it again
        for observer in self._observers:
            observer.version_changed(before, record)
        if text is not None:
            self.say("version", record.id, text, state=record.state.value, step=record.order.step, run=record.run)
        self.changed.notify()

    def since_seen(self, version: str) -> float | None:
        """Milliseconds since a version came to be known; None where that was before the service started."""
        seen = self._first_seen.get(version)
        return None if seen is None else (self.clock.monotonic() - seen) * 1000

    def engines_of(self, run: str) -> list[EngineRecord]:
        return self.engines.of_run(run)

    async def find(self, version: str) -> VersionRecord | None:
        """A version by its id, also one that was deleted. A JournalError says that the journal cannot be written just
        now, so that it may not hold the version's end yet.
        """
        if version in self.gone:
            await self.durable()
            return await asyncio.to_thread(self.journal.read, lambda each: rows.read_version(each, version))
        return self.versions.get(version)

    def versions_of(self, run: str) -> list[VersionRecord]:  # newest first
        return self.index.of_run(run)

    def published_of(self, run: str) -> list[VersionRecord]:
        """What the trainer of a run has published, newest first: `versions_of`, and the newest deleted evidence."""
        evidence = self.index.deleted_evidence.get(run)
        known = self.versions_of(run)
        if evidence is None or evidence.id in self.versions or self.runs.was_deleted(run, evidence.order):
            return known
        return sorted([evidence, *known], key=lambda version: version.order, reverse=True)

    def put_engine(self, record: EngineRecord, text: str | None = None) -> None:
        """Put an engine as it is now; `text` says in the log what happened to it."""
        before = self.engines.get(record.id)
        if before == record:
            return
        if before is None or (before.run, before.seen.startup_path) != (record.run, record.seen.startup_path):
            self.models_changed.notify()
        self.engines[record.id] = record
        if before is None or before.run != record.run:
            self.runs.count(self.engines.values(), self.clock.monotonic())
        if record.state is not EngineState.UNREACHABLE:
            self.away_since.pop(record.id, None)
        elif record.id not in self.away_since:
            self.away_since[record.id] = self.clock.now()
        for observer in self._observers:
            observer.engine_changed(before, record)
        self.journal.append(rows.put(record))
        if before is None and record.url in self.removed:  # whose knowledge of the address the record has taken over
            self._forget(record.url)
        if text is not None:
            self.say("engine", record.id, text, of_run=record.run, state=record.state.value)
        self.changed.notify()

    def drop_engine(self, engine_id: str) -> None:
        """Forget an engine and the leases that it held, except those of loads whose end is not known."""
        engine = self.engines.pop(engine_id, None)
        if engine is None:
            return
        self.runs.count(self.engines.values(), self.clock.monotonic())
        self.away_since.pop(engine_id, None)
        attempt = self.loading.get(engine_id)
        self.leave(engine if attempt is None or engine.pulls else in_mid_load(engine, attempt.version))
        for observer in self._observers:
            observer.engine_dropped(engine)
        self.journal.append(rows.drop_engine(engine_id))
        self.say("engine", engine_id, "removed", of_run=engine.run)
        self.changed.notify()

    def leave(self, engine: EngineRecord) -> None:
        """Keep what is known of an engine that is not named any more, where forgetting it may do harm."""
        left = left_behind(engine, self.clock.monotonic())
        heir = next((each for each in self.engines.values() if each.url == engine.url), None)
        if heir is not None:
            if left is not None:  # named anew meanwhile, by another name
                self.put_engine(replace(given_back(heir, left), state=EngineState.TAINTED), f"TAINTED: {left.reason}")
        elif left is not None:
            self.removed[engine.url] = left
            self.journal.append(rows.put(left))
        elif engine.url in self.removed:
            self._forget(engine.url)
        self.changed.notify()

    def _forget(self, address: str) -> None:
        del self.removed[address]
        self.journal.append(rows.drop_engine(address))

    def _tell_attempt(self, attempt: AttemptRecord) -> None:
        self.journal.append(rows.put(attempt))
        for observer in self._observers:
            observer.attempt_changed(attempt)

    def open_attempt(self, engine: str, version: str, kind: Kind | None = None) -> AttemptRecord:
        """Write the intent to load. Await `durable()` before the first call to the engine."""
        now, id_ = self.clock.now(), uuid.uuid4().hex
        attempt = AttemptRecord(id=id_, engine=engine, version=version, kind=kind, started_at=now, epoch=self.epoch)
        self.loading[engine] = attempt
        self._tell_attempt(attempt)
        return attempt

    def close_attempt(self, attempt: AttemptRecord) -> None:
        self.loading.pop(attempt.engine, None)
        self._tell_attempt(attempt)
        self.changed.notify()

    def fingerprint(self, version: str, configuration: str) -> str | None:
        """The fingerprint that a clean load of the version gave on an engine of this configuration."""
        return self._fingerprints.get((version, configuration))

    def forget_fingerprints(self, version: str) -> None:
        """Forget what clean loads of a version gave: its contents are others now."""
        for key in [key for key in self._fingerprints if key[0] == version]:
            del self._fingerprints[key]
        self.journal.append(rows.drop_fingerprints(version))
        for engine in [engine for engine in self.engines.values() if version in engine.contents.given]:
            given = {id_: found for id_, found in engine.contents.given.items() if id_ != version}
            self.put_engine(engine.having(given=given))

    def forget_contents(self, version: VersionRecord, why: str) -> None:
        """A version is to be deleted, and another of its name may come: nothing that was found of its contents counts
        then, nor what went wrong with loads of it.
        """
        self._retire(version, why)
        self.forget_fingerprints(version.id)
        for engine in [engine for engine in self.engines.values() if version.id in engine.trouble.strikes]:
            strikes = {id_: count for id_, count in engine.trouble.strikes.items() if id_ != version.id}
            self.put_engine(engine.having(strikes=strikes))

    def _retire(self, version: VersionRecord, why: str) -> None:
        retired = version.having(state=VersionState.RETIRED, reason=why, state_before=None, reason_before=None)
        if retired != version:
            self.put_version(retired, f"retired: {why}")

    def record_fingerprint(self, version: str, configuration: str, fingerprint: str) -> None:
        if self._fingerprints.get((version, configuration)) != fingerprint:  # each of a thousand engines gives the same
            self._fingerprints[version, configuration] = fingerprint
            found = records.FingerprintRecord(version=version, configuration=configuration, fingerprint=fingerprint)
            self.journal.append(rows.put(found))

    def start_update(self, run: str, version: str, cause: str) -> UpdateRecord:
        self._update_number += 1
        before = self.updates.get(run)
        update = UpdateRecord(
            number=self._update_number,
            run=run,
            version=version,
            cause=cause,
            started_at=self.clock.now(),
            paused_since=None if before is None else before.paused_since,
        )
        self.put_update(update, f"update {update.number} to {version}: {cause}")
        return update

    def put_update(self, record: UpdateRecord, text: str) -> None:
        """Put the newest update of a run as it is now; `text` says in the log what happened to it."""
        self.updates[record.run] = record
        self.journal.append(rows.put(record))
        for observer in self._observers:
            observer.update_changed(record)
        self.say("update", record.version, text, number=record.number, state=record.state.value)
        self.changed.notify()

    def pause_updates(self, record: UpdateRecord, *, paused: bool) -> None:
        """Pause the updates of a run at the last good version, or resume them. `record` is its newest update."""
        if paused is (record.paused_since is not None):
            return
        text = f"updates of run {record.run} {'are paused' if paused else 'go on'}"
        self.put_update(replace(record, paused_since=self.clock.now() if paused else None), text)

    def close_run(self, run: str) -> None:
        if run not in self.runs.closed:
            self._put_run(f"run {run} is closed", run, closed_at=self.clock.now())

    def reopen_run(self, run: str, why: str) -> None:
        if run in self.runs.closed:
            self._put_run(f"run {run} is open again: {why}", run, closed_at=None)

    def delete_run(self, run: str) -> int:
        """Delete what is known of a run, and return how many versions that are. Collection deletes their files."""
        newest = self.index.newest_ever.get(run)
        if newest is None:
            return 0
        if (update := self.updates.get(run)) is not None:
            self.pause_updates(update, paused=False)
        # The mark is written first: a service that dies from here on retires the rest when it is back.
        gone: dict[str, Any] = {"desired": None, "ordered": None, "deleted": newest}
        closed_at = self.runs.closed.get(run, self.clock.now())
        self._put_run(f"run {run} is deleted, up to {version_folder(newest)}", run, closed_at=closed_at, **gone)
        return self._retire_deleted(run)

    def _retire_deleted(self, run: str) -> int:
        going = [version for version in self.versions_of(run) if self.runs.was_deleted(run, version.order)]
        for version in going:
            self._retire(version, f"run {run} was deleted")
        return len(going)

    def put_order(self, record: records.RunRecord, text: str) -> None:
        """Put what the upstream wants of a run (`desired`, `ordered`)."""
        self.runs.remember(record)
        self._put_run(text, record.run)

    def _put_origin(self, **facts: Any) -> None:
        self.origin = replace(self.origin, **facts)
        self.journal.append(rows.put_origin(self.origin))

    def put_lead(self, lead: records.HostLead, text: str | None) -> None:
        """Put which hub this host obeys; `text` says in the log that it is another one, or leads anew."""
        self._put_origin(lead=lead)
        for observer in self._observers:
            observer.lead_changed()
        if text is not None:
            self.say("root", "upstream", text)

    def leave_behind(self, run: str, had: dict[str, tuple[str, int]]) -> None:
        """An operator rolls back: hosts leave also what this service does not know, as `RunRecord.left` has it."""
        known = self.runs.record_of(run)
        if had:
            self.put_order(replace(known, left={**known.left, **had}), "a rollback: hosts leave what is not known here")

    def newest_known(
        self, run: str, host: str | None = None, stands: Mapping[str, str | None] = MappingProxyType({})
    ) -> str | None:
        """The id of the newest version of a run that was good here, or that a rollback has left here (for None) or on a
        host.

        `stands` is what the host's engines serve or were to serve, and the digests, None where it does not say. Where
        one of these is not known here, only what a rollback has left counts: a newer version that is good here says
        nothing of what the host has.
        """
        left = parse_version_id(self.runs.left.get(run, {}).get(host or "", ("", 0))[0])
        here = (at[1] for id_ in stands if (at := parse_version_id(id_)) is not None and at[0] == run)
        is_strange = not all(self._has(id_of(run, order), stands.get(id_of(run, order))) for order in here)
        known = (None if is_strange else self.index.newest_known(run), None if left is None else left[1])
        newest = max((order for order in known if order is not None), default=None)
        return None if newest is None else id_of(run, newest)

    def _has(self, version: str, digest: str | None) -> bool:
        """Whether a version is known here, with these contents. Without a verdict that is not known yet."""
        known = self.versions.get(version)
        if known is None or digest is None:
            return known is not None or version in self.gone
        return not known.state.is_open if known.digest is None else known.digest == digest

    def _put_run(self, text: str, run: str, **facts: Any) -> None:
        record = replace(self.runs.record_of(run), **facts)
        self.runs.remember(record)
        self.journal.append(rows.put(record))
        self.say("run", run, text, closed=run in self.runs.closed)
        self.changed.notify()

    def rebuilt(self) -> None:
        """The root was listed and every engine asked: what a lost journal knew is known again, as far as it can be."""
        self._put_origin(rebuilt=True)
        self.say("journal", "journal", "rebuilt: the root was listed and every engine asked; collecting begins")

    def is_about(self, root: RootMark | None) -> None:
        if root != self.origin.root:
            self._put_origin(root=root)

    def say(
        self, kind: str, subject: str, text: str, *, of_run: str | None = None, is_fault: bool = False, **data: Any
    ) -> None:
        """Add to the log of decisions, which is also the event stream.

        `kind` is "version", "engine", "update", "run", "root" or "journal". `of_run` is the run that it concerns, where
        the subject does not name it. `is_fault`: something is wrong, which `data` does not show by its state.
        """
        self.last_event += 1
        event = Event(
            seq=self.last_event,
            at=self.clock.now(),
            kind=kind,
            subject=subject,
            text=text,
            data=data,
            run=of_run or run_of(kind, subject),
            severity=LogSeverity.WARNING if is_fault else severity_of(data),
        )
        self.journal.append(rows.put(event))
        tell = log.warning if event.severity is LogSeverity.WARNING else log.info
        tell(text, kind=kind, subject=subject, **named(event), **data)
        for observer in self._observers:
            observer.decided(event)
        self.changed.notify()
