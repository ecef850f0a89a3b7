"""Keeps copies at what engines are to serve: asks `decide`, writes, tells the store. One task a run.

Each copy goes through the same steps, so that nobody begins to read what is about to be written:

    decide           which copy, from what; nothing is awaited between this and the next line
    let go           no engine begins to load what the copy holds any more, and what it is made from has a lease
    durable          wait until all that was before is on disk: who reads what is no guess after a crash
    decide again     what came during that wait still counts
    write            in threads; a kill leaves a copy that is worth nothing
    carry            engines may go there
"""

import asyncio
from dataclasses import replace
from typing import Protocol, TypeGuard

import structlog

from refitd.materialize.disk import CopyFolders
from refitd.materialize.refusals import Refusals
from refitd.materialize.trouble import CopyError, MisfitError, SourceChangedError
from refitd.policy.copy_readers import Readers, readers_of
from refitd.policy.in_place import needs_copy
from refitd.policy.leases import Views
from refitd.policy.materialize import Decision, Hopeless, Ready, Wait, Write, decide
from refitd.policy.next_action import stays
from refitd.policy.spare_copies import CopyVerdict, spare
from refitd.policy.target import last_good
from refitd.rollout.targets import Targets
from refitd.root.outcome import Refused
from refitd.state.copy import COPY_STAGE, Copy, doubted
from refitd.state.journal.journal import JournalError
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd_client.contract.states import Kind, VersionState
from refitd_client.contract.wire import Reclaimable

LOOK_SECONDS = 10.0  # between two looks when nothing changes
PAUSE_SECONDS = 1.0  # after an error of the disk

log = structlog.get_logger("refitd")


class Facts(Protocol):
    """What is true now; `refitd.reclaim.collector.StoreFacts`."""

    def views(self) -> Views:
        """What leases are made of."""
        ...

    def rebuilding(self) -> str | None:
        """Why nobody knows who reads what, None where it is known."""
        ...


class Copier:
    """Belongs to one root. `most` is how many copies a run may have; with none it only takes away what is there."""

    def __init__(self, store: Store, targets: Targets, facts: Facts, folders: CopyFolders, *, most: int) -> None:
        self._store = store
        self._targets = targets
        self._facts = facts
        self._folders = folders
        self._most = most
        self._refusals = Refusals(store, targets)
        self._copies: dict[str, Copy] = {}
        self._is_surveyed = False
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._needs: dict[str, frozenset[str]] = {}
        self._checks: dict[str, asyncio.Task[bool]] = {}

    async def run(self) -> None:
        """Follow the store until cancelled."""
        seen = -1
        async with asyncio.TaskGroup() as group:
            while True:
                seen = await self._store.changed.wait_after(seen, within=LOOK_SECONDS)
                if self._is_surveyed or await self.survey():
                    self._look(group)

    async def check(self, version: VersionRecord) -> bool:
        """Whether the copy that holds a delta is as it was written; where it is not, it holds nothing from here on.

        Engines that ask at the same time share one look.
        """
        path = self._targets.carriage.path_of(version)
        copy = next((copy for copy in self._copies.values() if copy.path == path), None)
        if copy is None or copy.holds != version.id:
            return False
        if copy.name not in self._checks:
            self._checks[copy.name] = task = asyncio.create_task(self._is_unchanged(copy))
            task.add_done_callback(lambda _: self._checks.pop(copy.name, None))
        return await asyncio.shield(self._checks[copy.name])

    def why_waiting(self, version: VersionRecord) -> str | None:
        """What a delta waits for that no copy holds, None where it waits for nothing."""
        return self._refusals.waiting.get(version.id)

    @property
    def bytes_on_root(self) -> int:
        """What they take of the root's room: nothing where they lie in a folder of their own."""
        return sum(copy.bytes for copy in self._copies.values() if not copy.path.startswith("/"))

    async def plan(self) -> list[Reclaimable]:
        """What of the copies would be taken away and kept, and why."""
        return [_line(verdict) for verdict in self._verdicts()]

    async def sweep(self) -> list[Reclaimable]:
        """Take away the copies that nobody needs."""
        return [await self._settle(verdict) for verdict in self._verdicts()]

    async def _is_unchanged(self, copy: Copy) -> bool:
        found = await self._folders.signature(copy)
        if (found is None or isinstance(found, str)) and found != copy.signature:
            self._say_changed(copy, copy.holds)
            if self._copies.get(copy.name) == copy:
                self._forget(copy)
        return found == copy.signature

    async def survey(self) -> bool:
        """See what a former life has left, best before engines are asked; until it is known nothing is written."""
        try:
            found = await self._folders.survey()
        except OSError as error:
            log.warning("the copies cannot be listed", error=str(error))
            return False
        self._copies = {copy.name: copy for copy in found}
        for copy in found:
            if copy.holds is None:  # its note names a version, and its files are not those that were written
                self._say_changed(copy, copy.read_as)
        self._is_surveyed = True
        self._carry_all()
        return True

    def _say_changed(self, copy: Copy, version: str | None) -> None:
        if version is not None:
            text = f"its copy in {copy.path} was changed by somebody else: it is written anew before an engine loads it"
            self._store.say("version", version, text)

    def _carry_all(self) -> None:
        """Whatever a copy holds can be loaded from it."""
        for copy in self._copies.values():
            version = self._store.versions.get(copy.holds or "")
            if version is not None and version.kind is Kind.DELTA and version.digest == copy.digest:
                self._targets.carry(version, copy.path)

    def _look(self, group: asyncio.TaskGroup) -> None:
        for run in self._runs() if self._most else ():
            if run not in self._tasks and self._target(run) is not None:
                self._tasks[run] = group.create_task(self._work(run), name=f"copy {run}")

    def _runs(self) -> list[str]:
        """Those with deltas that could be carried out, but for runs that have ended and have no engines."""
        versions, runs = self._store.versions.values(), self._store.runs
        deltas = {v.run for v in versions if v.kind is Kind.DELTA and v.state is VersionState.SEALED}
        return sorted(run for run in deltas if run not in runs.closed or run in runs.followed_since)

    def _target(self, run: str) -> VersionRecord | None:
        """The delta that needs a copy now: what engines are to serve, or a newer one that could not be carried out."""
        if self._is_paused(run):
            return self._target_of_pause(run)
        wanted = self._targets.of_run(run).wanted
        again = self._refusals.due(self._store.versions_of(run), self._decide)
        if again is not None and (wanted is None or again.order > wanted.order):
            return again
        return wanted if self._is_without(wanted) else None

    def _target_of_pause(self, run: str) -> VersionRecord | None:
        """What engines go back to: no copy of it is given up for something newer, where nobody goes now."""
        good = self._targets.of_run(run).last_served
        if not self._is_without(good):
            return None
        is_refused = self._targets.carriage.is_refused(good)
        return self._refusals.due([good], self._decide) if is_refused else good

    def _is_paused(self, run: str) -> bool:
        rollout = self._store.rollouts.get(run)
        return rollout is not None and rollout.paused_since is not None

    def _is_without(self, version: VersionRecord | None) -> TypeGuard[VersionRecord]:
        """Whether it needs a copy and has none."""
        return version is not None and not self._targets.carriage.can_load(version) and self._is_needed(version)

    def _is_needed(self, delta: VersionRecord) -> bool:
        """Whether there is an engine, or may come one, that does not take it in place."""
        engines = self._store.engines_of(delta.run)
        return not engines or any(needs_copy(engine, delta, self._store.versions) for engine in engines)

    async def _work(self, run: str) -> None:
        """Bring copies up to date until nothing more can be done now."""
        target = None
        try:
            while (target := self._target(run)) is not None and await self._step(target):
                pass
        except (OSError, JournalError) as error:
            log.warning("no copy was written this time", run=run, error=str(error))
            if target is not None:
                self._refusals.wait(target, f"a copy could not be written: {error}")
            await asyncio.sleep(PAUSE_SECONDS)
            await self._look_anew(run)
            self._store.changed.notify()
        finally:
            self._read_from(run, frozenset())
            self._tasks.pop(run, None)

    async def _step(self, target: VersionRecord) -> bool:
        """Whether there may be more to do at once."""
        decision = self._decide(target)
        match decision:
            case Ready(copy):
                self._targets.carry(target, copy.path)
                return True
            case Wait(reason):
                self._refusals.wait(target, reason)
                return False
            case Hopeless(reason):
                self._refusals.refuse(target, reason)
                return True
            case Write():
                await self._prepare(target, decision)
                return True

    async def _prepare(self, target: VersionRecord, order: Write) -> None:
        for copy in (order.into, order.instead_of):
            if copy is not None and copy.holds is not None:
                self._targets.let_go(copy.holds, copy.run)
        self._read_from(target.run, frozenset(order.needs))
        await self._store.durable()
        if self._target(target.run) != target or self._decide(target) != order:
            self._carry_all()  # something came during that wait
            return
        if order.instead_of is not None:
            self._copies.pop(order.instead_of.name, None)
            outcome = await self._folders.discard(order.instead_of)
            if isinstance(outcome, Refused):  # its room is not free
                self._copies[order.instead_of.name] = doubted(order.instead_of)
                self._refusals.refuse(target, f"no copy could make room for another: {outcome.reason}")
                return
        await self._write(target, order)

    async def _write(self, target: VersionRecord, order: Write) -> None:
        if order.into is not None:
            self._copies[order.into.name] = replace(doubted(order.into), read_as=None)  # nobody reads it
        started = self._store.clock.monotonic()
        try:
            copy = await self._folders.write(order)
        except MisfitError as error:
            self._refusals.misfit(target, order, str(error))
        except SourceChangedError as error:
            await self._look_anew(target.run)
            self._source_changed(target, order.source, str(error))
        except CopyError as error:
            self._refusals.refuse(target, str(error))
        else:
            self._copies[copy.name] = copy
            self._written(target, copy, (self._store.clock.monotonic() - started) * 1000)

    def _source_changed(self, target: VersionRecord, source: Copy | VersionRecord, why: str) -> None:
        """A copy that was changed is a source no more: the next decision takes another. Of a version's files there are
        no others.
        """
        if isinstance(source, Copy) and self._copies.get(source.name) != source:
            self._store.say("version", target.id, f"{why}: the copy of {target.id} is made from others")
        else:
            self._refusals.refuse(target, why)

    def _written(self, target: VersionRecord, copy: Copy, milliseconds: float) -> None:
        version = self._store.versions.get(target.id)
        if version is not None:
            if version.served_at is None:  # a copy that is written later was not on its way to engines
                version = replace(version, timings={COPY_STAGE: milliseconds} | version.timings)
                self._store.put_version(version)
            self._refusals.carried(version)
            self._targets.carry(version, copy.path)

    async def _look_anew(self, run: str) -> None:
        """Something was not as it was thought to be. Nobody but this run's task writes its copies meanwhile."""
        try:
            found = {copy.name: copy for copy in await self._folders.survey() if copy.run == run}
        except OSError as error:
            log.warning("the copies cannot be listed", error=str(error))
            return
        for copy in [copy for copy in self._copies.values() if copy.run == run and copy != found.get(copy.name)]:
            self._forget(copy)
            if copy.name not in found:
                del self._copies[copy.name]

    def _decide(self, target: VersionRecord) -> Decision:
        if (waits_for := self._facts.rebuilding()) is not None:
            return Wait(f"the journal was lost and is being rebuilt: {waits_for}")
        copies = [self._believed(copy) for copy in self._copies.values() if copy.run == target.run and not copy.fault]
        good = last_good(self._store.versions_of(target.run))
        return decide(
            target,
            self._store.versions,
            copies,
            self._readers(copies),
            most=self._most,
            last_good=None if good is None else good.id,
            misfits=self._refusals.misfits(target),
            stays=self._stays,
        )

    def _stays(self, engine_id: str) -> bool:
        engine = self._store.engines.get(engine_id)
        return engine is not None and stays(engine.to_load, self._targets.of_engine(engine.to_load))

    def _believed(self, copy: Copy) -> Copy:
        """A copy is about a version with a digest: the root may have been emptied, and the run begun anew."""
        version = self._store.versions.get(copy.holds or "")
        return copy if version is None or version.digest == copy.digest else doubted(copy)

    def _readers(self, copies: list[Copy]) -> dict[str, Readers]:
        paths = {engine.id: engine.paths for engine in self._store.engines.values()}
        return readers_of(copies, self._facts.views(), paths)

    def _forget(self, copy: Copy) -> None:
        """Nobody begins to load it any more."""
        if copy.holds is not None:
            self._targets.let_go(copy.holds, copy.run)
        self._copies[copy.name] = doubted(copy)

    def _read_from(self, run: str, needs: frozenset[str]) -> None:
        self._needs[run] = needs
        self._targets.copy_from(frozenset[str]().union(*self._needs.values()))

    def _verdicts(self) -> list[CopyVerdict]:
        if not self._is_surveyed or self._facts.rebuilding() is not None:
            return []
        copies = list(self._copies.values())
        runs = self._runs() if self._most else []
        return spare(copies, self._readers(copies), runs=runs, busy=self._tasks.keys(), most=self._most)

    async def _settle(self, verdict: CopyVerdict) -> Reclaimable:
        """Nothing is awaited between the verdict of the first copy and its end; later ones are asked about again."""
        copy = verdict.copy
        now = next((each for each in self._verdicts() if each.copy == copy), None)
        if now is None or now.keep:
            return _line(now or verdict)
        self._forget(copy)
        del self._copies[copy.name]
        outcome = await self._folders.discard(copy)
        if isinstance(outcome, Refused):
            self._copies[copy.name] = doubted(copy)
            return _line(CopyVerdict(copy, keep=True, reason=outcome.reason))
        return _line(now)


def _line(verdict: CopyVerdict) -> Reclaimable:
    return Reclaimable(path=verdict.copy.path, keep=verdict.keep, reasons=[verdict.reason], bytes=verdict.copy.bytes)
