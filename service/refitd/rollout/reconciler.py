"""One engine, kept on its run's target: the shell around `next_action`. One task an engine, one action at a time.

What it looks at and writes down is the engine's `EngineEntry`; how it loads is `Loads`.
"""

import asyncio
import random
from contextlib import suppress
from dataclasses import replace
from typing import assert_never

from structlog.contextvars import bound_contextvars

from refitd.engine.port import Coming, EnginePort, Reached
from refitd.policy.contest import forgiven, twin_of
from refitd.policy.next_action import (
    Agenda,
    CancelPrefetch,
    Prefetch,
    Probe,
    RefitTo,
    Rest,
    Resume,
    backoff,
    next_action,
)
from refitd.policy.observe import Expected, after_probe, standing
from refitd.rollout.entry import EngineEntry, RemovedError
from refitd.rollout.load import FileAccess, Loads
from refitd.rollout.targets import Targets
from refitd.state.records import EngineRecord
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd_client.contract.states import EngineState, Kind

_AWAY = frozenset({EngineState.PROBING, EngineState.UNREACHABLE})


class EngineReconciler:
    """Keeps one engine on its run's target until cancelled."""

    def __init__(
        self,
        engine_id: str,
        engine: EnginePort,
        store: Store,
        targets: Targets,
        *,
        files: FileAccess,
        probe_interval: float,
        chance: random.Random,
    ) -> None:
        self.id = engine_id
        self._engine = engine
        self._store = store
        self._targets = targets
        self._entry = EngineEntry(engine_id, store, targets, chance)
        self._seen_path = files.seen_path
        self._loads = Loads(self._entry, engine, files, probe_interval)
        self._probe_interval = probe_interval
        self._chance = chance
        self._stopping = False

    async def run(self) -> None:
        """Look, decide, act, until stopped, cancelled or the engine is removed."""
        with suppress(RemovedError), bound_contextvars(engine=self.id):
            while not self._stopping:
                await self._turn()

    async def _turn(self) -> None:
        seen, entry = self._targets.changed.count, self._entry
        entry.arrive()
        action = next_action(entry.record.to_load, entry.goals, entry.agenda, entry.now)
        match action:
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

    def stop(self) -> None:
        """End `run` after the action that is under way."""
        self._stopping = True
        self._targets.changed.notify()

    def resync(self) -> None:
        """Have the engine loaded again whatever it serves: at once, or when it can be reached again.

        What it serves until then stays known: an engine that is away is asked for nothing, and nothing is forgotten.
        """
        self._entry.agenda = Agenda(ahead=self._entry.agenda.ahead)
        record = forgiven(replace(self._entry.record, failures=0, taints=0, strikes={}))
        record = replace(record, reload=record.known)  # one with unknown contents is loaded in any case
        if record.state is EngineState.QUARANTINED:
            record = replace(record, state=EngineState.TAINTED)
        elif record.known and record.state not in _AWAY and record.taken is None:
            record = replace(record, state=EngineState.BEHIND, reason="a resync was asked for")
        when = " when it is reachable" if record.state is EngineState.UNREACHABLE else ""
        self._store.put_engine(record, f"resync was asked for: it will be loaded again{when}")
        self._targets.changed.notify()

    async def trial(self, version: VersionRecord) -> str | None:
        """Ask the engine for a few tokens; return what is wrong with them, None where nothing is."""
        return await self._engine.trial(version.label)

    async def _prefetch(self, version: str) -> None:
        """Have the engine prepare a version. It is not recorded: it changes nothing, and the load gives the answer.

        The request ends as soon as there is something else to do than to load that version.
        """
        self._entry.agenda = replace(self._entry.agenda, ahead=version)
        record = self._store.versions[version]
        missing, extra = record.allow_missing, record.allow_extra
        coming = Coming(version=version, path=record.path, allow_missing=missing, allow_extra=extra)
        async with asyncio.TaskGroup() as group:
            request = group.create_task(self._engine.prefetch(coming))

            async def end_request() -> None:
                seen = self._targets.changed.count
                while self._waits_for(version):
                    seen = await self._targets.changed.wait_after(seen)
                request.cancel()

            guard = group.create_task(end_request())
            request.add_done_callback(lambda _: guard.cancel())

    def _waits_for(self, version: str) -> bool:
        entry = self._entry
        if not entry.is_named:
            return False
        match next_action(entry.record.to_load, entry.goals, entry.agenda, entry.now):
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
        wait = self._probe_interval
        if not isinstance(seen, Reached):
            entry.agenda = replace(entry.agenda, failed=None)
            wait = min(wait, backoff(1, self._chance)) if before.state is EngineState.PROBING else wait
        entry.agenda = replace(entry.agenda, probe_at=entry.now + wait)
        twin = twin_of(entry.record, seen, self._store.engines.values()) if isinstance(seen, Reached) else None
        after = after_probe(
            entry.record,
            seen,
            self._expected(),
            entry.target_id,
            entry.now,
            interval=self._probe_interval,
            twin=twin,
        )
        if isinstance(seen, Reached) and before.state in _AWAY and after.serving is not None:
            after = await self._adopted(after)
        entry.put(before, after)

    async def _adopted(self, engine: EngineRecord) -> EngineRecord:
        """Compare the contents of an engine that was away with the record: path and label are only names."""
        recorded = self._entry.fingerprint_of(engine.serving or "")
        found = await self._engine.fingerprint(recorded)
        if recorded is None or found == recorded:  # where there is a record, an answer that is lost proves nothing
            return engine
        reason = f"its contents are not those of {engine.serving}, whatever its label says"
        return standing(replace(engine, serving=None, reason=reason), self._entry.target_id)

    def _expected(self) -> Expected | None:
        record = self._entry.record
        serving = self._store.versions.get(record.serving or "")
        if serving is None:  # the version was collected meanwhile: what it left behind is what counts
            return Expected(path=record.model_path or "", label=record.weight_version or "")
        if serving.kind is Kind.DELTA:  # loaded from a copy, which may hold something else by now, or be gone
            return Expected(path=record.model_path or "", label=serving.label)
        return Expected(path=self._seen_path(serving) or "", label=serving.label)

    async def _resume(self) -> None:
        entry = self._entry
        if await self._engine.resume():
            self._store.put_engine(replace(entry.record, resume_owed=False))
        else:
            entry.agenda = replace(entry.agenda, resume_at=entry.later(1), probe_at=0.0)
