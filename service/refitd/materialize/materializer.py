"""Keeps copies at the versions that engines are to serve: asks `decide`, writes, tells the store. One task a run.

Each copy goes through the same steps, so that no engine begins to read what is about to be written:

    decide           which copy, from what; nothing is awaited between this and the next step
    release          no engine begins to load what the copy holds any more, and what it is made from has a lease
    durable          all that was before is on disk: after a crash it is known which engine reads what
    decide again     what came during that wait still counts
    write            in threads; a kill leaves a copy that is worth nothing
    carry            engines may go there
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeGuard

import structlog

from refitd.materialize.disk import DiskCopies
from refitd.materialize.files import CopyError, MisfitError, SourceChangedError
from refitd.policy.chain import needs_copy
from refitd.policy.goals import last_good
from refitd.policy.materialize import (
    CopyReady,
    CopyVerdict,
    Decision,
    NoCopyPossible,
    Readers,
    WaitForCopy,
    WriteCopy,
    decide,
    readers_of,
    spare,
)
from refitd.policy.next_action import stays
from refitd.reclaim.facts import StoreFacts
from refitd.root.outcome import Refused
from refitd.state.copy import COPY_STAGE, Copy, doubted
from refitd.state.journal.journal import JournalError
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.update.targets import Targets
from refitd_client.contract.states import Kind, VersionState
from refitd_client.contract.wire import Reclaimable

LOOK_SECONDS = 10.0  # between two looks when nothing changes
PAUSE_SECONDS = 1.0  # after an error of the disk
FIRST_RETRY_SECONDS = 10.0  # before a refused delta is tried again
LONGEST_SECONDS = 60.0

log = structlog.get_logger("refitd")


class Refusals:
    """Deltas that cannot be carried out, and when to try again; `waiting` says by id what others wait for."""

    def __init__(self, store: Store, targets: Targets) -> None:
        self._store = store
        self._targets = targets
        self._misfits: dict[str, set[str]] = {}
        self._again_at: dict[str, float] = {}
        self._tries: dict[str, int] = {}
        self.waiting: dict[str, str] = {}

    def misfits(self, target: VersionRecord) -> frozenset[str]:
        """Return the ids of the versions from which a delta was not reached."""
        return frozenset(self._misfits.get(target.id, ()))

    def misfit(self, target: VersionRecord, order: WriteCopy, reason: str) -> None:
        """Note that a copy did not come out as the delta promises: the next is made from something else."""
        source = order.source.id if isinstance(order.source, VersionRecord) else order.source.holds or ""
        self._misfits.setdefault(target.id, set()).add(source)
        self._store.say("version", target.id, f"{reason}: the copy of {target.id} is made from others than {source}")

    def carried(self, target: VersionRecord) -> None:
        """Forget the trouble with a delta that a copy holds."""
        self.waiting.pop(target.id, None)
        self._tries.pop(target.id, None)

    def refuse(self, target: VersionRecord, reason: str) -> None:
        """Leave engines on what they have; the delta is tried again after a wait that grows."""
        self.waiting.pop(target.id, None)
        tries = self._tries[target.id] = self._tries.get(target.id, 0) + 1
        wait = min(FIRST_RETRY_SECONDS * 2 ** min(tries - 1, 10), LONGEST_SECONDS)
        self._again_at[target.id] = self._store.clock.monotonic() + wait
        self._targets.refuse(target, reason)

    def due(
        self, versions: Iterable[VersionRecord], decide: Callable[[VersionRecord], Decision]
    ) -> VersionRecord | None:
        """Return the first refused delta that is to be tried again now. It stays refused until a copy holds it."""
        now = self._store.clock.monotonic()
        for known in (self._misfits, self._again_at, self._tries, self.waiting):
            for gone in [version for version in known if version not in self._store.versions]:
                del known[gone]
        for version in versions:
            is_refused = self._targets.carriage.is_refused(version) and version.state is VersionState.SEALED
            if is_refused and not version.barred and now >= self._again_at.get(version.id, now):
                if isinstance(decide(version), CopyReady | WriteCopy):
                    return version
                self._again_at[version.id] = now + FIRST_RETRY_SECONDS
        return None


class Materializer:
    """Writes and removes the copies of one root.

    Args:
        store: versions, engines, updates.
        targets: what engines are to serve, and what they can load.
        facts: what is read by whom.
        folders: the copies on disk.
        most: how many copies a run may have; with 0 existing ones are taken away and none is written.
    """

    def __init__(self, store: Store, targets: Targets, facts: StoreFacts, folders: DiskCopies, *, most: int) -> None:
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
                if not self._is_surveyed and not await self.survey():
                    continue
                for run in self._runs():
                    if run not in self._tasks and self._target(run) is not None:
                        self._tasks[run] = group.create_task(self._work(run), name=f"copy {run}")

    async def check(self, version: VersionRecord) -> bool:
        """Return whether the copy that holds a delta is as it was written; where it is not, it holds nothing any more.

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
        """Return what a delta waits for that no copy holds, None where it waits for nothing."""
        return self._refusals.waiting.get(version.id)

    @property
    def bytes_on_root(self) -> int:
        """Bytes of the root that copies take: none where they lie in a folder of their own."""
        return sum(copy.bytes for copy in self._copies.values() if not copy.path.startswith("/"))

    async def plan(self) -> list[Reclaimable]:
        """Return which copies would be taken away or kept, and why."""
        return [_line(verdict) for verdict in self._verdicts()]

    async def sweep(self) -> list[Reclaimable]:
        """Take away the copies that are not needed."""
        return [await self._settle(verdict) for verdict in self._verdicts()]

    async def survey(self) -> bool:
        """See what an earlier start has left, best before engines are asked; until then nothing is written."""
        try:
            found = await self._folders.survey()
        except OSError as error:
            log.warning("the copies cannot be listed", error=str(error))
            return False
        self._copies = {copy.name: copy for copy in found}
        for copy in found:
            if copy.holds is None:  # where its note names a version, its files are not those that were written
                self._say_changed(copy, copy.read_as)
        self._is_surveyed = True
        self._carry_all()
        return True

    async def _is_unchanged(self, copy: Copy) -> bool:
        found = await self._folders.signature(copy)
        if (found is None or isinstance(found, str)) and found != copy.signature:
            self._say_changed(copy, copy.holds)
            if self._copies.get(copy.name) == copy:
                self._release(copy)
        return found == copy.signature

    def _say_changed(self, copy: Copy, version: str | None) -> None:
        if version is not None:
            text = f"its copy in {copy.path} was changed by another program: it is written anew before a load"
            self._store.say("version", version, text)

    def _carry_all(self) -> None:
        """Let engines load from the copies what they hold."""
        for copy in self._copies.values():
            version = self._store.versions.get(copy.holds or "")
            if version is not None and version.kind is Kind.DELTA and version.digest == copy.digest:
                self._targets.carry(version, copy.path)

    def _runs(self) -> list[str]:
        """Return the runs with deltas that could be carried out, but for closed ones that no engine follows."""
        if not self._most:
            return []
        versions, runs = self._store.versions.values(), self._store.runs
        deltas = {v.run for v in versions if v.kind is Kind.DELTA and v.state is VersionState.SEALED}
        return sorted(run for run in deltas if run not in runs.closed or run in runs.followed_since)

    def _target(self, run: str) -> VersionRecord | None:
        """Return the delta that needs a copy now: what engines are to serve, or a newer one that was refused before.

        In a paused run that is what engines go back to: no copy of it is given up for something newer, where no engine
        goes now.
        """
        update = self._store.updates.get(run)
        if update is not None and update.paused_since is not None:
            good = self._targets.of_run(run).last_served
            if not self._lacks_copy(good):
                return None
            return self._refusals.due([good], self._decide) if self._targets.carriage.is_refused(good) else good
        wanted = self._targets.of_run(run).wanted
        again = self._refusals.due(self._store.versions_of(run), self._decide)
        if again is not None and (wanted is None or again.order > wanted.order):
            return again
        return wanted if self._lacks_copy(wanted) else None

    def _lacks_copy(self, version: VersionRecord | None) -> TypeGuard[VersionRecord]:
        """Return whether no copy holds it and an engine, now or to come, does not take it in place."""
        if version is None or self._targets.carriage.can_load(version):
            return False
        engines, versions = self._store.engines_of(version.run), self._store.versions
        ordered = self._targets.of_run(version.run).ordered
        return not engines or any(needs_copy(each.to_load, version, versions, ordered=ordered) for each in engines)

    async def _work(self, run: str) -> None:
        """Bring copies up to date until nothing more can be done now."""
        target = None
        try:
            while (target := self._target(run)) is not None and await self._step(target):
                pass
        except (OSError, JournalError) as error:
            log.warning("no copy was written this time", run=run, error=str(error))
            if target is not None:
                self._refusals.waiting[target.id] = f"a copy could not be written: {error}"
            await asyncio.sleep(PAUSE_SECONDS)
            await self._survey_again(run)
            self._store.changed.notify()
        finally:
            self._copy_from(run, frozenset())
            self._tasks.pop(run, None)

    async def _step(self, target: VersionRecord) -> bool:
        """Do what is decided; return whether there may be more to do at once."""
        match decision := self._decide(target):
            case CopyReady(copy):
                self._targets.carry(target, copy.path)
            case WaitForCopy(reason):
                self._refusals.waiting[target.id] = reason
                return False
            case NoCopyPossible(reason):
                self._refusals.refuse(target, reason)
            case WriteCopy():
                await self._prepare(target, decision)
        return True

    async def _prepare(self, target: VersionRecord, order: WriteCopy) -> None:
        for copy in (order.into, order.instead_of):
            if copy is not None and copy.holds is not None:
                self._targets.let_go(copy.holds, copy.run)
        self._copy_from(target.run, frozenset(order.needs))
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

    async def _write(self, target: VersionRecord, order: WriteCopy) -> None:
        if order.into is not None:
            self._copies[order.into.name] = replace(doubted(order.into), read_as=None)  # no engine reads it
        started = self._store.clock.monotonic()
        try:
            copy = await self._folders.write(order)
        except MisfitError as error:
            self._refusals.misfit(target, order, str(error))
        except SourceChangedError as error:
            await self._survey_again(target.run)
            source = order.source
            if isinstance(source, Copy) and self._copies.get(source.name) != source:  # the next decision takes another
                self._store.say("version", target.id, f"{error}: the copy of {target.id} is made from others")
            else:
                self._refusals.refuse(target, str(error))
        except CopyError as error:
            self._refusals.refuse(target, str(error))
        else:
            self._copies[copy.name] = copy
            self._written(target, copy, (self._store.clock.monotonic() - started) * 1000)

    def _written(self, target: VersionRecord, copy: Copy, milliseconds: float) -> None:
        version = self._store.versions.get(target.id)
        if version is not None:
            if version.served_at is None:  # a copy that is written later was not on its way to engines
                version = replace(version, timings={COPY_STAGE: milliseconds} | version.timings)
                self._store.put_version(version)
            self._refusals.carried(version)
            self._targets.carry(version, copy.path)

    async def _survey_again(self, run: str) -> None:
        """Find out what a run's copies are, after an error. Only this run's task writes them meanwhile."""
        try:
            found = {copy.name: copy for copy in await self._folders.survey() if copy.run == run}
        except OSError as error:
            log.warning("the copies cannot be listed", error=str(error))
            return
        for copy in [copy for copy in self._copies.values() if copy.run == run and copy != found.get(copy.name)]:
            self._release(copy)
            if copy.name not in found:
                del self._copies[copy.name]

    def _decide(self, target: VersionRecord) -> Decision:
        if (waits_for := self._facts.rebuilding()) is not None:
            return WaitForCopy(f"the journal was lost and is being rebuilt: {waits_for}")
        # The root may have been emptied and the run begun anew: then a copy's version has another digest.
        digests = {version.id: version.digest for version in self._store.versions_of(target.run)}
        copies = [
            copy if digests.get(copy.holds or "", copy.digest) == copy.digest else doubted(copy)
            for copy in self._copies.values()
            if copy.run == target.run and not copy.fault
        ]
        good = last_good(self._store.versions_of(target.run))

        def is_at_rest(engine_id: str) -> bool:
            engine = self._store.engines.get(engine_id)
            return engine is not None and stays(engine.to_load, self._targets.of_engine(engine.to_load))

        return decide(
            target,
            self._store.versions,
            copies,
            self._readers(copies),
            most=self._most,
            last_good=None if good is None else good.id,
            misfits=self._refusals.misfits(target),
            stays=is_at_rest,
        )

    def _readers(self, copies: list[Copy]) -> dict[str, Readers]:
        if not copies:
            return {}
        paths = {engine.id: engine.paths for engine in self._store.engines.values()}
        return readers_of(copies, self._facts.views(), paths)

    def _release(self, copy: Copy) -> None:
        """Let no engine begin to load a copy any more."""
        if copy.holds is not None:
            self._targets.let_go(copy.holds, copy.run)
        self._copies[copy.name] = doubted(copy)

    def _copy_from(self, run: str, needs: frozenset[str]) -> None:
        self._needs[run] = needs
        self._targets.copy_from(frozenset[str]().union(*self._needs.values()))

    def _verdicts(self) -> list[CopyVerdict]:
        if not self._is_surveyed or self._facts.rebuilding() is not None:
            return []
        copies = list(self._copies.values())
        return spare(copies, self._readers(copies), runs=self._runs(), busy=self._tasks.keys(), most=self._most)

    async def _settle(self, verdict: CopyVerdict) -> Reclaimable:
        """Take a copy away if the verdict still holds: others were deleted since, which takes time."""
        copy = verdict.copy
        now = next((each for each in self._verdicts() if each.copy == copy), None)
        if now is None or now.keep:
            return _line(now or verdict)
        self._release(copy)
        del self._copies[copy.name]
        outcome = await self._folders.discard(copy)
        if isinstance(outcome, Refused):
            self._copies[copy.name] = doubted(copy)
            return _line(CopyVerdict(copy, keep=True, reason=outcome.reason))
        return _line(now)


def _line(verdict: CopyVerdict) -> Reclaimable:
    return Reclaimable(path=verdict.copy.path, keep=verdict.keep, reasons=[verdict.reason], bytes=verdict.copy.bytes)
