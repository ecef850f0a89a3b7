"""Has copies made of the deltas that engines are to serve, tells the store, and has them deleted. One task a run."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeGuard

import structlog

from refitd.policy.chain import NoBase, needs_copy
from refitd.policy.materialize import COPY_STAGE, Copy, CopyVerdict, MakeCopy, decide, spare
from refitd.reclaim.books import Books
from refitd.root.scan import Refused
from refitd.state.journal.journal import JournalError
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.update.reconciler import FilesCheck
from refitd.update.targets import Targets
from refitd_client.contract.states import Kind, VersionState
from refitd_client.contract.wire import Reclaimable
from refitd_inside.materialize.disk import DiskCopies
from refitd_inside.materialize.writing import CopyError, MisfitError, SourceChangedError

LOOK_SECONDS = 10.0  # between two looks when nothing changes
PAUSE_SECONDS = 1.0  # after an error of the disk
RETRY_SECONDS = 30.0  # before a refused delta is tried again

log = structlog.get_logger("refitd")


class Materializer:
    def __init__(self, store: Store, targets: Targets, facts: Books, folders: DiskCopies) -> None:
        self._store = store
        self._targets = targets
        self._facts = facts
        self._folders = folders
        self._copies: dict[str, Copy] = {}  # by path
        self._waiting: dict[str, str] = {}  # why a delta has no copy yet, by its id
        self._again_at: dict[str, float] = {}  # when a refused delta is tried again, by its id
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._needs: dict[str, frozenset[str]] = {}  # what is read, by run
        self._checks: dict[str, asyncio.Task[bool]] = {}

    async def run(self) -> None:
        seen = -1
        async with asyncio.TaskGroup() as group:
            while True:
                seen = await self._store.changed.wait_after(seen, within=LOOK_SECONDS)
                for run in self._runs():
                    if run not in self._tasks and self._target(run) is not None:
                        self._tasks[run] = group.create_task(self._work(run), name=f"copy {run}")

    def checking(self, full: Callable[[VersionRecord], Awaitable[bool]]) -> FilesCheck:
        """Return a check of the files that an engine loads. `full` checks a version's own, which are those of a full
        version, and of a delta that is written in place.
        """

        async def check(version: VersionRecord, *, in_place: bool = False) -> bool:
            is_copy = version.kind is Kind.DELTA and not in_place
            return await (self.check(version) if is_copy else full(version))

        return check

    async def check(self, version: VersionRecord) -> bool:
        """Return whether the copy that holds a delta is as it was written; where it is not, it holds nothing any more.

        Engines that ask at the same time share one look.
        """
        copy = self._copies.get(self._targets.carriage.path_of(version) or "")
        if copy is None or copy.holds != version.id:
            return False
        if copy.path not in self._checks:
            self._checks[copy.path] = task = asyncio.create_task(self._is_unchanged(copy))
            task.add_done_callback(lambda _: self._checks.pop(copy.path, None))
        return await asyncio.shield(self._checks[copy.path])

    async def _is_unchanged(self, copy: Copy) -> bool:
        found = await self._folders.signature(copy)
        if (found is None or isinstance(found, str)) and found != copy.signature:
            text = f"its copy in {copy.path} was changed by another program: it is made anew before a load"
            self._store.say("version", copy.version or "", text)
            if self._copies.get(copy.path) == copy:
                self._release(copy)
        return found == copy.signature

    def why_waiting(self, version: VersionRecord) -> str | None:
        """Return what a delta waits for that no copy holds, None where it waits for nothing."""
        return self._waiting.get(version.id)

    @property
    def bytes_on_root(self) -> int:
        return sum(copy.bytes for copy in self._copies.values())

    def _runs(self) -> list[str]:
        """Return the runs with deltas that could be carried out, but for closed ones that no engine follows."""
        versions, runs = self._store.versions.values(), self._store.runs
        deltas = {v.run for v in versions if v.kind is Kind.DELTA and v.state is VersionState.SEALED}
        return sorted(run for run in deltas if run not in runs.closed or run in runs.followed_since)

    def _target(self, run: str) -> VersionRecord | None:
        """Return the delta that needs a copy now: what engines are to serve, or a newer one that was refused before.

        In a paused run that is what engines go back to: none goes to something newer now.
        """
        goals, update = self._targets.of_run(run), self._store.updates.get(run)
        if update is not None and update.paused_since is not None:
            good = goals.last_served
            if not self._lacks_copy(good):
                return None
            return self._due([good]) if self._targets.carriage.is_refused(good) else good
        again = self._due(self._store.versions_of(run))
        if again is not None and (goals.wanted is None or again.order > goals.wanted.order):
            return again
        return goals.wanted if self._lacks_copy(goals.wanted) else None

    def _lacks_copy(self, version: VersionRecord | None) -> TypeGuard[VersionRecord]:
        """Return whether no copy holds it and an engine, now or to come, does not take it in place."""
        if version is None or self._targets.carriage.can_load(version):
            return False
        engines, versions = self._store.engines_of(version.run), self._store.versions
        ordered = self._targets.of_run(version.run).ordered
        return not engines or any(needs_copy(each.to_load, version, versions, ordered=ordered) for each in engines)

    def _due(self, versions: list[VersionRecord]) -> VersionRecord | None:
        """Return the first refused delta that is to be tried again now. It stays refused until a copy holds it."""
        now = self._store.clock.monotonic()
        for version in versions:
            is_refused = self._targets.carriage.is_refused(version) and version.state is VersionState.SEALED
            if is_refused and not version.barred and now >= self._again_at.get(version.id, now):
                if not isinstance(self._decide(version), NoBase):
                    return version
                self._again_at[version.id] = now + RETRY_SECONDS
        return None

    async def _work(self, run: str) -> None:
        target = None
        for known in (self._waiting, self._again_at):
            for gone in known.keys() - self._store.versions.keys():
                del known[gone]
        try:
            while (target := self._target(run)) is not None and await self._step(target):
                pass
        except (OSError, JournalError) as error:
            log.warning("no copy was made this time", run=run, error=str(error))
            if target is not None:
                self._waiting[target.id] = f"a copy could not be made: {error}"
            await asyncio.sleep(PAUSE_SECONDS)
            self._store.changed.notify()
        finally:
            self._copy_from(run, frozenset())
            self._tasks.pop(run, None)

    async def _step(self, target: VersionRecord) -> bool:
        match decision := self._decide(target):
            case Copy():
                self._targets.carry(target, decision.path)
            case NoBase(reason, final=False):
                self._waiting[target.id] = reason
                return False
            case NoBase(reason):
                self._refuse(target, reason)
            case MakeCopy():
                self._copy_from(target.run, decision.needs)
                await self._make(target, decision)
        return True

    async def _make(self, target: VersionRecord, order: MakeCopy) -> None:
        started = self._store.clock.monotonic()
        try:
            copy = await self._folders.write(order)
        except (MisfitError, SourceChangedError) as error:
            if not isinstance(order.source, Copy):
                self._refuse(target, str(error))
                return
            text = f"{error}: the copy of {target.id} is made from another than {order.source.path}"
            self._store.say("version", target.id, text)
            self._release(order.source)
        except CopyError as error:
            self._refuse(target, str(error))
        else:
            self._copies[copy.path] = copy
            self._written(target, copy, (self._store.clock.monotonic() - started) * 1000)

    def _refuse(self, target: VersionRecord, reason: str) -> None:
        self._waiting.pop(target.id, None)
        self._again_at[target.id] = self._store.clock.monotonic() + RETRY_SECONDS
        self._targets.refuse(target, reason)

    def _written(self, target: VersionRecord, copy: Copy, milliseconds: float) -> None:
        version = self._store.versions.get(target.id)
        if version is not None:
            if version.served_at is None:  # a copy that is made later was not on its way to engines
                version = version.having(timings={COPY_STAGE: milliseconds} | version.career.timings)
                self._store.put_version(version)
            self._waiting.pop(version.id, None)
            self._targets.carry(version, copy.path)

    def _decide(self, target: VersionRecord) -> Copy | MakeCopy | NoBase:
        copies = [copy for copy in self._copies.values() if copy.run == target.run and self._is_of_known(copy)]
        return decide(target, self._store.versions, copies)

    def _is_of_known(self, copy: Copy) -> bool:
        """Whether it was made of the version that has its name: a run may have begun anew in an emptied root."""
        version = self._store.versions.get(copy.holds or "")
        return version is None or version.digest == copy.digest

    def _release(self, copy: Copy) -> None:
        """Let no engine begin to load a copy any more."""
        if copy.holds is not None:
            self._targets.let_go(copy.holds, copy.run)
        self._copies[copy.path] = copy.doubted()

    def _copy_from(self, run: str, needs: frozenset[str]) -> None:
        self._needs[run] = needs
        self._targets.copy_from(frozenset[str]().union(*self._needs.values()))

    async def plan(self) -> list[Reclaimable]:
        await self._find_left()
        return [_line(verdict) for verdict in self._verdicts()]

    async def sweep(self) -> list[Reclaimable]:
        await self._find_left()
        return [await self._settle(verdict) for verdict in self._verdicts()]

    async def _find_left(self) -> None:
        """See what an earlier start or another program has left. Copies of this start stay as they are known."""
        try:
            found = {copy.path: copy for copy in await self._folders.survey()}
        except OSError as error:
            log.warning("the copies cannot be listed", error=str(error))
            return
        known = {path: copy for path, copy in self._copies.items() if copy.fault is None or path in found}
        self._copies = found | known

    def _verdicts(self) -> list[CopyVerdict]:
        if self._facts.rebuilding() is not None:
            return []
        goals = [self._targets.of_run(run) for run in self._runs()]
        wanted = {goal.id for each in goals for goal in (each.wanted, each.last_served) if goal is not None}
        paths = {engine.id: engine.paths for engine in self._store.engines.values()}
        copies = list(self._copies.values())
        return spare(copies, self._facts.views(), paths, busy=self._tasks.keys(), wanted=wanted)

    async def _settle(self, verdict: CopyVerdict) -> Reclaimable:
        """Take a copy away if the verdict still holds: others were deleted since, which takes time."""
        copy = verdict.copy
        now = next((each for each in self._verdicts() if each.copy == copy), None)
        if now is None or now.keep:
            return _line(now or verdict)
        self._release(copy)
        outcome = await self._folders.discard(copy)
        if isinstance(outcome, Refused):
            return _line(CopyVerdict(copy, keep=True, reason=outcome.reason))
        del self._copies[copy.path]
        return _line(now)


def _line(verdict: CopyVerdict) -> Reclaimable:
    return Reclaimable(path=verdict.copy.path, keep=verdict.keep, reasons=[verdict.reason], bytes=verdict.copy.bytes)
