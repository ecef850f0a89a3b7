"""One engine, kept on its run's target: the shell around `next_action`. One task an engine, one action at a time.

It looks at the engine's `EngineEntry` and writes into it. `Loads` are its loads, by a version's files or from its
trainer's memory: the intent, the call, the outcome. The order of writes is the point. The intent to load is durable
before the engine is told to, so that a crash in the middle is found at the next start and the engine counts as TAINTED;
what it makes ready before writes nothing. The outcome is written after the engine was resumed, so that no journal write
lengthens a pause.

Has an engine look at a version before its verdict, and prove it where its GPUs can.
"""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol, assert_never

from structlog.contextvars import bound_contextvars

from refitd.clock import in_turn_to_pause
from refitd.engine.port import (
    Coming,
    EnginePort,
    Offered,
    Outcome,
    RankProof,
    Reached,
    Refit,
    Stage,
    Target,
    Unreached,
    VersionFiles,
)
from refitd.policy.admit import needs_reading
from refitd.policy.chain import begun, takes_in_place, why_not_over
from refitd.policy.contest import twin_of
from refitd.policy.goals import skipped_between
from refitd.policy.next_action import (
    Action,
    CancelPrefetch,
    Prefetch,
    Probe,
    RefitTo,
    Rest,
    Resume,
    next_action,
    until_retry,
)
from refitd.policy.observe import Expected, after_probe, after_refit, compared, refit_at_stop, standing
from refitd.state.records import NOT_SENT, AttemptRecord, EngineRecord
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.update.entry import EngineEntry, RemovedError
from refitd.update.proving import RankProofs
from refitd.update.targets import Targets
from refitd_client.contract.states import EngineState, Kind

_NOT_DURABLE = "without a durable intent nothing is sent"


class SeenPath(Protocol):
    """A version's path as the engine sees it, None for a delta that it does not take in place and no copy holds now."""

    def __call__(self, version: VersionRecord, *, in_place: bool = False) -> str | None: ...


class FilesCheck(Protocol):
    """Whether the files that an engine is about to read, or has read, are those that were found good."""

    async def __call__(self, version: VersionRecord, /, *, in_place: bool = False) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FileAccess:
    """How one engine reads versions. `check` marks a version LOST whose files changed, and `prove` has the service read
    what GPUs of other engines have proved.
    """

    seen_path: SeenPath
    check: FilesCheck
    prove: Callable[[VersionRecord], Awaitable[bool]]


class EngineReconciler:
    def __init__(
        self,
        engine_id: str,
        engine: EnginePort,
        store: Store,
        targets: Targets,
        *,
        files: FileAccess,
        proofs: RankProofs,
        probe_interval: float,
        chance: random.Random,
    ) -> None:
        self.id = engine_id
        self._engine = engine
        self._proofs = proofs
        self._store = store
        self._targets = targets
        self._entry = EngineEntry(engine_id, store, targets, probe_interval, chance)
        self._seen_path = files.seen_path
        self._loads = Loads(self._entry, engine, files)
        self._chance = chance
        self._stopping = False

    async def run(self) -> None:
        with suppress(RemovedError), bound_contextvars(engine=self.id):
            while not self._stopping:
                await self._turn()

    async def _turn(self) -> None:
        seen, entry = self._targets.changed.count, self._entry
        entry.arrive()
        action = self._decide()
        match action:
            case Rest() if entry.hasten():
                pass  # decide again
            case Rest(until):
                await self._targets.changed.wait_after(seen, within=until - entry.now)
            case Probe():
                await self._probe()
            case Resume():
                await self._resume()
            case Prefetch(version):
                await self._prefetch(version)
            case CancelPrefetch():
                await self._cancel_prefetch()
            case RefitTo(version, offer):
                loads = self._loads
                await (loads.by_files(version) if offer is None else loads.from_memory(version, offer))
                await self._cancel_prefetch()  # where no load came of it
            case _:
                assert_never(action)

    def _decide(self) -> Action:
        """Ask what to do next, by what the engine is to serve and which of that has a fingerprint on record."""
        entry, record = self._entry, self._entry.record
        engine, goals = record.to_load, self._targets.of_engine(record)
        candidates = (goals.target, goals.loadable, goals.last_good)
        recorded = frozenset(v.id for v in candidates if v is not None and entry.fingerprint_of(v.id) is not None)
        return next_action(engine, replace(goals, recorded=recorded) if recorded else goals, entry.agenda, entry.now)

    def stop(self) -> None:
        self._stopping = True
        self._targets.changed.notify()

    def resync(self) -> None:
        """Have the engine loaded again whatever it serves: at once, or when it can be reached again."""
        self._entry.resync()
        self._targets.changed.notify()

    async def trial(self, version: VersionRecord) -> str | None:
        return await self._engine.trial(version.label)

    async def _prefetch(self, version: str) -> None:
        self._entry.agenda = replace(self._entry.agenda, ahead=version)
        record = self._store.versions[version]
        await look_ahead(self._entry, self._engine, record, self._proofs, lambda: self._waits_for(version))

    def _waits_for(self, version: str) -> bool:
        if not self._entry.is_named:
            return False
        match self._decide():
            case Rest() | Probe():
                return not self._stopping
            case RefitTo(wanted, offer):
                return offer is None and wanted.id == version and not self._stopping
            case _:
                return False

    async def _cancel_prefetch(self) -> None:
        self._entry.agenda = replace(self._entry.agenda, ahead=None)
        await self._engine.cancel_prefetch()

    async def _probe(self) -> None:
        entry, before = self._entry, self._entry.record
        seen = await self._engine.probe()
        if not isinstance(seen, Reached):
            entry.agenda = replace(entry.agenda, failed=None)
        twin = twin_of(entry.record, seen, self._store.engines.at(seen.address)) if isinstance(seen, Reached) else None
        interval = entry.until_look()
        told = self._store.versions.get((seen.serves if isinstance(seen, Reached) else None) or "")
        after = after_probe(
            entry.record, seen, self._expected(), entry.target_id, entry.now, interval=interval, twin=twin, told=told
        )
        if isinstance(seen, Reached) and after.serving not in (None if before.state.is_away else before.serving, None):
            after = await self._adopted(after)
        entry.put(before, after)
        is_first = isinstance(seen, Unreached) and not seen.is_awaited and before.state is EngineState.PROBING
        entry.look_again(most=until_retry(1, self._chance) if is_first else math.inf)

    async def _adopted(self, engine: EngineRecord) -> EngineRecord:
        """Compare the contents of an engine that was away with the record: path and label are only names."""
        entry, serving = self._entry, engine.serving or ""
        recorded = entry.fingerprint_of(serving)
        found = await self._engine.fingerprint(recorded)
        if recorded is None and found is not None and (engine.pulls or entry.is_on_record(serving)):
            # A host proves by itself what it has carried out, whether or not its answer was heard: it gives a record.
            return standing(entry.proved(engine, found), entry.target_id)
        after = compared(engine, recorded, found, entry.target_id)
        entry.agrees(after, found)
        return after

    def _expected(self) -> Expected | None:
        record = self._entry.record
        serving = self._store.versions.get(record.serving or "")
        if serving is None:  # the version was collected meanwhile: what it left behind is what counts
            return Expected(path=record.contents.model_path or "", label=record.contents.weight_version or "")
        keeps = serving.kind is Kind.DELTA  # its copy may be gone by now
        return Expected(
            path=(keeps and record.contents.model_path) or self._seen_path(serving) or "", label=serving.label
        )

    async def _resume(self) -> None:
        entry = self._entry
        if await self._engine.resume():
            self._store.put_engine(entry.record.having(resume_owed=False))
        else:
            entry.agenda = replace(entry.agenda, resume_at=entry.later(1), probe_at=0.0)


class Loads:
    def __init__(self, entry: EngineEntry, engine: EnginePort, files: FileAccess) -> None:
        self._entry = entry
        self._store = entry.store
        self._engine = engine
        self._files = files

    async def by_files(self, version: VersionRecord) -> None:
        in_place = takes_in_place(self._entry.record.to_load, version, self._store.versions)
        kind = Kind.FULL if version.kind is Kind.DELTA and not in_place else version.kind
        attempt = self._store.open_attempt(self._entry.id, version.id, kind)  # from here on the version is leased
        with bound_contextvars(version=version.id, attempt=attempt.id, **self._update_of(version)):
            refused = why_not_over(self._entry.record, version, self._store.versions)
            before = self._updating(version, f"loads {version.id}")
            if refused is not None:
                self._drop(before, attempt, refused)
                self._entry.put(before, self._entry.record.having(reason=refused))
                return
            # Right before each load, because the files may have been rewritten or deleted since they were sealed; and
            # the disk writes the intent meanwhile.
            path = self._files.seen_path(version, in_place=in_place)
            unchanged, unwritten = await asyncio.gather(
                self._are_proved(version, in_place=in_place), self._entry.written()
            )
            if unwritten is not None:
                self._drop(before, attempt, f"{unwritten}: {_NOT_DURABLE}")
                return
            if not unchanged or path is None:
                self._drop(before, attempt, "its files are not those that were checked, or cannot be looked at")
                return
            target = self._target_for(before, version, path, in_place=in_place)
            refit = await self._refitted(before, version, target, attempt)
            self._close(before, version, refit, attempt)

    async def _are_proved(self, version: VersionRecord, *, in_place: bool) -> bool:
        """Whether its files are those that were found good, and found so by who has to for this engine."""
        if needs_reading(version, self._entry.record) and not await self._files.prove(version):
            return False
        return await self._files.check(version, in_place=in_place)

    async def from_memory(self, version: VersionRecord, offer: str) -> None:
        """Load from the trainer's memory, once: an engine whose load fails waits for the files."""
        attempt = self._store.open_attempt(self._entry.id, version.id, Kind.HANDOVER)
        with bound_contextvars(version=version.id, attempt=attempt.id, **self._update_of(version)):
            try:
                await self._take(
                    attempt, version, Offered(version=version.id, path=version.path, offer=offer, sent=version.is_sent)
                )
            finally:
                if self._entry.is_named:  # the trainer does not wait for an engine that was removed
                    self._entry.targets.answered(self._entry.record, version)

    async def _take(self, attempt: AttemptRecord, version: VersionRecord, offered: Offered) -> None:
        before = self._updating(version, f"takes {version.id} from its trainer's memory")
        try:
            unwritten, _ = await asyncio.gather(self._entry.written(), self._engine.prefetch(offered))
        except asyncio.CancelledError:
            self._drop(before, attempt, "the service was stopped before the load")
            raise
        if unwritten is not None:
            self._drop(before, attempt, f"{unwritten}: {_NOT_DURABLE}")
            return
        path = self._files.seen_path(version) or ""
        target = replace(self._target_for(before, version, path, in_place=False), offered=offered)
        refit = await self._refitted(before, version, target, attempt)
        if refit.outcome is not Outcome.NACK:
            self._close(before, version, refit, attempt)
            return
        # It did not take what was offered: it holds what it held, and nothing is wrong with the version.
        closed = self._close_attempt(attempt, refit)
        self._entry.unless_removed(before)
        owes = self._entry.record.having(last_attempt=closed, resume_owed=not refit.resumed, reason=refit.reason)
        owes = owes.having(kept=before.contents.kept)
        self._entry.put(before, replace(owes, state=before.state))

    def _update_of(self, version: VersionRecord) -> dict[str, int]:
        """The number of the update that brings a version here; none for one that goes back to the last good one."""
        update = self._store.updates.get(version.run)
        return {} if update is None or update.version != version.id else {"update": update.number}

    def _updating(self, version: VersionRecord, text: str) -> EngineRecord:
        before = self._entry.record
        self._store.put_engine(replace(begun(before, version), state=EngineState.UPDATING), f"UPDATING: {text}")
        return before

    def _target_for(self, engine: EngineRecord, version: VersionRecord, path: str, *, in_place: bool) -> Target:
        serving = self._store.versions.get(engine.serving or engine.contents.held or "")
        differs = serving is not None and serving.differs_in_weights(version)
        files = None  # what the plugin has to know of a version; None where it finds no manifest
        is_full = in_place or version.kind is not Kind.DELTA
        has_manifest = version.files.owned or version.files.described
        if is_full and has_manifest and version.digest is not None and version.files.signature is not None:
            files = VersionFiles(
                version=version.id,
                path=version.path,
                digest=version.digest,
                signature=version.files.signature,
                allow_missing=version.announced.may_lack,
                allow_extra=version.announced.allow_extra,
            )

        async def is_unchanged() -> bool:
            # The engine itself holds what it takes from memory against its fingerprints.
            return version.state.is_open or await self._files.check(version, in_place=in_place)

        return Target(
            path=path,
            label=version.label,
            fingerprint=self._entry.fingerprint_of(version.id),
            not_fingerprint=self._entry.own_fingerprint_of(serving.id) if serving is not None and differs else None,
            repairs=not engine.known,
            files=files,
            in_place=in_place,
            unchanged=is_unchanged,
            hears=self._entry.hears,
        )

    async def _refitted(
        self, before: EngineRecord, version: VersionRecord, target: Target, attempt: AttemptRecord
    ) -> Refit:
        def on_stage(stage: Stage) -> None:
            if stage is Stage.VERIFY and self._entry.is_named:
                verifying = replace(self._entry.record, state=EngineState.VERIFYING)
                self._store.put_engine(verifying, f"VERIFYING: has loaded {version.id}")

        try:
            async with in_turn_to_pause():
                refit = await self._engine.refit(target, on_stage)
            return replace(refit, recorded=target.fingerprint is None)
        except asyncio.CancelledError:
            refit = refit_at_stop(before)
            self._close(before, version, refit, attempt)
            # That the service was stopped is no reason against the version: no strike, and no failure.
            if (record := self._store.engines.get(self._entry.id)) is not None:
                held, taints = before.serving or before.contents.held, before.trouble.taints
                kept = record.having(
                    strikes=before.trouble.strikes, failures=before.trouble.failures, taints=taints, held=held
                )
                self._store.put_engine(kept)
            raise

    def _close(self, before: EngineRecord, version: VersionRecord, refit: Refit, attempt: AttemptRecord) -> None:
        """Write down how a load ended, and when to try again."""
        entry, closed = self._entry, self._close_attempt(attempt, refit)
        if not entry.is_named:
            entry.unless_removed(after_refit(before, version.id, refit, entry.now))
        after = after_refit(entry.record.having(last_attempt=closed), version.id, refit, entry.now)
        if refit.outcome is Outcome.ACK:
            after = self._acknowledged(before, after, version, refit)
        if refit.outcome is Outcome.NACK:
            after = after.having(kept=before.contents.kept)
        if refit.outcome is not Outcome.ACK and not refit.needs_full:  # that one needs another version, and not to wait
            later = entry.later(max(after.trouble.failures, after.trouble.strikes.get(version.id, 0), 1))
            entry.agenda = replace(entry.agenda, failed=version.id, retry_at=later)
        if refit.outcome is Outcome.TAINTED:
            after = entry.gave_other(after, version.id, refit.fingerprint)
        entry.put(before, after)
        if refit.outcome is Outcome.ACK and refit.resumed:
            entry.look_again(anew=True)

    def _drop(self, before: EngineRecord, attempt: AttemptRecord, reason: str) -> None:
        """Close an attempt that was never sent to the engine: the engine is as it was."""
        entry = self._entry
        self._store.close_attempt(replace(attempt, outcome=NOT_SENT, reason=reason))
        entry.unless_removed(before)
        entry.agenda = replace(entry.agenda, failed=attempt.version, retry_at=entry.later(1))
        entry.put(before, entry.record.having(state=before.state, kept=before.contents.kept))

    def _close_attempt(self, attempt: AttemptRecord, refit: Refit) -> AttemptRecord:
        closed = replace(attempt, outcome=refit.outcome.name, reason=refit.reason, timings=refit.timings)
        self._store.close_attempt(closed)
        return closed

    def _acknowledged(
        self, before: EngineRecord, after: EngineRecord, version: VersionRecord, refit: Refit
    ) -> EngineRecord:
        store, entry = self._store, self._entry
        failed = None if entry.agenda.failed == version.id else entry.agenda.failed
        entry.agenda = replace(entry.agenda, failed=failed, probe_at=entry.now)
        after = entry.proved(after, refit.fingerprint)
        serving = store.versions.get(before.serving or "")
        skipped = skipped_between(store.versions_of(version.run), serving, version)
        in_place = takes_in_place(before.to_load, version, store.versions)
        after = after.having(
            weight_version=version.label,
            model_path=self._files.seen_path(version, in_place=in_place) or after.contents.model_path,
            beneath=(before.contents.beneath or before.serving) if in_place and not before.pulls else None,
            wants_full=version.kind is Kind.DELTA and not in_place,  # its plugin knows nothing of what a copy held
            skipped=before.contents.skipped + len(skipped),
        )
        target = version.id if version.state.is_open else entry.target_id  # what is held from memory is the target
        return standing(after, target) if refit.resumed else after


async def look_ahead(
    entry: EngineEntry, engine: EnginePort, version: VersionRecord, proofs: RankProofs, waits: Callable[[], bool]
) -> None:
    """Have an engine prepare a version. It is not recorded: it changes nothing, and the load gives the answer. `waits`:
    whether there is still nothing else to do than to load that version; the request ends when there is.
    """
    proves = proofs.begin(version, entry.id)
    coming = Coming(
        version=version.id,
        path=version.path,
        allow_missing=version.announced.may_lack,
        allow_extra=version.announced.allow_extra,
        prove=proves,
    )
    found: Sequence[RankProof] = ()
    try:
        async with asyncio.TaskGroup() as group:
            request = group.create_task(engine.prefetch(coming))

            async def end_request() -> None:
                seen = entry.targets.changed.count
                while waits():
                    seen = await entry.targets.changed.wait_after(seen)
                request.cancel()

            guard = group.create_task(end_request())
            request.add_done_callback(lambda _: guard.cancel())
        found = () if request.cancelled() else request.result()
    finally:
        if proves:
            proofs.end(version.id, entry.id, found)
