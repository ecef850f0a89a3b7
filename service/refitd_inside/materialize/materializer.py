"""Has copies made of the deltas that engines are to serve, tells the store, and has them deleted. One task a run.

Right before a load, of any kind of version, its files are checked once more and read ahead. Files are read ahead into
the page cache, so that the engine pauses less. The kernel is asked to read and is not waited for: what was just
validated is in the cache already, what engines go back to after hours may not be. A file system in memory needs none of
it, and the caches of other hosts cannot be reached from here.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeGuard

import structlog

from refitd.policy.chain import needs_copy
from refitd.policy.goals import LoadableDeltas
from refitd.policy.materialize import (
    COPY_STAGE,
    Copy,
    CopyReady,
    CopyVerdict,
    Decision,
    MakeCopy,
    NoCopyPossible,
    WaitForCopy,
    decide,
    doubted,
    spare,
)
from refitd.reclaim.books import Books
from refitd.root.handle import LOOK_TIMEOUT_SECONDS, RootThreads
from refitd.root.scan import Refused
from refitd.state.journal.journal import JournalError
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.update.targets import Targets
from refitd_client.backoff import backoff
from refitd_client.checkpoint.opening import ChangedError, Folder, OpeningRefusedError
from refitd_client.contract.states import Kind, VersionState
from refitd_client.contract.wire import Reclaimable
from refitd_inside.materialize.disk import DiskCopies
from refitd_inside.materialize.writing import CopyError, MisfitError, SourceChangedError

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
        self._again_at: dict[str, float] = {}
        self._tries: dict[str, int] = {}
        self.waiting: dict[str, str] = {}

    def carried(self, target: VersionRecord) -> None:
        """Forget the trouble with a delta that a copy holds."""
        self.waiting.pop(target.id, None)
        self._tries.pop(target.id, None)

    def refuse(self, target: VersionRecord, reason: str) -> None:
        """Leave engines on what they have; the delta is tried again after a wait that grows."""
        self.waiting.pop(target.id, None)
        tries = self._tries[target.id] = self._tries.get(target.id, 0) + 1
        wait = backoff(tries, FIRST_RETRY_SECONDS, LONGEST_SECONDS)
        self._again_at[target.id] = self._store.clock.monotonic() + wait
        self._targets.refuse(target, reason)

    def due(
        self, versions: Iterable[VersionRecord], decide: Callable[[VersionRecord], Decision]
    ) -> VersionRecord | None:
        """Return the first refused delta that is to be tried again now. It stays refused until a copy holds it."""
        now = self._store.clock.monotonic()
        for known in (self._again_at, self._tries, self.waiting):
            for gone in [version for version in known if version not in self._store.versions]:
                del known[gone]
        for version in versions:
            is_refused = self._targets.carriage.is_refused(version) and version.state is VersionState.SEALED
            if is_refused and not version.barred and now >= self._again_at.get(version.id, now):
                if isinstance(decide(version), CopyReady | MakeCopy):
                    return version
                self._again_at[version.id] = now + FIRST_RETRY_SECONDS
        return None


class Materializer:
    """Has copies made and removed in one root.

    Args:
        store: versions, engines, updates.
        targets: what engines are to serve, and what they can load.
        facts: what is read by whom.
        folders: the copies on disk.
    """

    def __init__(self, store: Store, targets: Targets, facts: Books, folders: DiskCopies) -> None:
        self._store = store
        self._targets = targets
        self._facts = facts
        self._folders = folders
        self._refusals = Refusals(store, targets)
        self._copies: dict[str, Copy] = {}
        self._is_surveyed = False
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._needs: dict[str, frozenset[str]] = {}  # what is read, by run
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
        copy = self._copies.get(self._targets.carriage.path_of(version) or "")
        if copy is None or copy.holds != version.id:
            return False
        if copy.path not in self._checks:
            self._checks[copy.path] = task = asyncio.create_task(self._is_unchanged(copy))
            task.add_done_callback(lambda _: self._checks.pop(copy.path, None))
        return await asyncio.shield(self._checks[copy.path])

    def why_waiting(self, version: VersionRecord) -> str | None:
        """Return what a delta waits for that no copy holds, None where it waits for nothing."""
        return self._refusals.waiting.get(version.id)

    @property
    def bytes_on_root(self) -> int:
        """Bytes of the root that copies take."""
        return sum(copy.bytes for copy in self._copies.values())

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
        self._copies = {copy.path: copy for copy in found}
        for copy in found:
            if copy.holds is None:
                self._say_changed(copy)
        self._is_surveyed = True
        self._carry_all()
        return True

    async def _is_unchanged(self, copy: Copy) -> bool:
        found = await self._folders.signature(copy)
        if (found is None or isinstance(found, str)) and found != copy.signature:
            self._say_changed(copy)
            if self._copies.get(copy.path) == copy:
                self._release(copy)
        return found == copy.signature

    def _say_changed(self, copy: Copy) -> None:
        if copy.version is not None:
            text = f"its copy in {copy.path} was changed by another program: it is made anew before a load"
            self._store.say("version", copy.version, text)

    def _carry_all(self) -> None:
        """Let engines load from the copies what they hold."""
        for copy in self._copies.values():
            version = self._store.versions.get(copy.holds or "")
            if version is not None and version.kind is Kind.DELTA and version.digest == copy.digest:
                self._targets.carry(version, copy.path)

    def _runs(self) -> list[str]:
        """Return the runs with deltas that could be carried out, but for closed ones that no engine follows."""
        versions, runs = self._store.versions.values(), self._store.runs
        deltas = {v.run for v in versions if v.kind is Kind.DELTA and v.state is VersionState.SEALED}
        return sorted(run for run in deltas if run not in runs.closed or run in runs.followed_since)

    def _target(self, run: str) -> VersionRecord | None:
        """Return the delta that needs a copy now: what engines are to serve, or a newer one that was refused before.

        In a paused run that is what engines go back to: none goes to something newer now.
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
        """Make copies until nothing more can be done now."""
        target = None
        try:
            while (target := self._target(run)) is not None and await self._step(target):
                pass
        except (OSError, JournalError) as error:
            log.warning("no copy was made this time", run=run, error=str(error))
            if target is not None:
                self._refusals.waiting[target.id] = f"a copy could not be made: {error}"
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
                self._refusals.refuse(target, str(error))
                return
            text = f"{error}: the copy of {target.id} is made from another than {order.source.path}"
            self._store.say("version", target.id, text)
            self._release(order.source)
            await self._folders.disbelieve(order.source)
        except CopyError as error:
            self._refusals.refuse(target, str(error))
        else:
            self._copies[copy.path] = copy
            self._written(target, copy, (self._store.clock.monotonic() - started) * 1000)

    def _written(self, target: VersionRecord, copy: Copy, milliseconds: float) -> None:
        version = self._store.versions.get(target.id)
        if version is not None:
            if version.served_at is None:  # a copy that is made later was not on its way to engines
                version = version.having(timings={COPY_STAGE: milliseconds} | version.career.timings)
                self._store.put_version(version)
            self._refusals.carried(version)
            self._targets.carry(version, copy.path)

    async def _survey_again(self, run: str) -> None:
        """Find out what a run's copies are, after an error. Only this run's task makes them meanwhile."""
        try:
            found = {copy.path: copy for copy in await self._folders.survey() if copy.run == run}
        except OSError as error:
            log.warning("the copies cannot be listed", error=str(error))
            return
        for copy in [copy for copy in self._copies.values() if copy.run == run and copy != found.get(copy.path)]:
            self._release(copy)
            if copy.path not in found:
                del self._copies[copy.path]
        self._copies = found | self._copies

    def _decide(self, target: VersionRecord) -> Decision:
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
        self._copies[copy.path] = doubted(copy)

    def _copy_from(self, run: str, needs: frozenset[str]) -> None:
        self._needs[run] = needs
        self._targets.copy_from(frozenset[str]().union(*self._needs.values()))

    def _verdicts(self) -> list[CopyVerdict]:
        if not self._is_surveyed or self._facts.rebuilding() is not None:
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


IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_STEP = 2**17  # bytes: what Linux reads ahead where it is not set otherwise


class Warmer:
    """Warms folders beneath the root. Engines that go to one version at the same time share one reading."""

    def __init__(self, root: Path, kind: Callable[[], str], threads: RootThreads | None = None) -> None:
        """`kind` returns the type of the root's file system."""
        self._root = root
        self._kind = kind
        self._warming: dict[str, asyncio.Task[None]] = {}
        self._threads = threads or RootThreads()

    async def warm(self, path: str) -> None:
        """Have a folder's files read ahead. Best effort: an error here is for the load to find."""
        task = self._warming.get(path)
        if task is None:
            task = self._warming[path] = asyncio.create_task(self._in_thread(path))
            task.add_done_callback(lambda _: self._warming.pop(path, None))
        await asyncio.shield(task)  # one engine that is cancelled stops no other's reading

    async def _in_thread(self, path: str) -> None:
        with suppress(OSError):  # of a root that hangs as well: that, too, is for the load to find
            await self._threads.run(f"reading {path} ahead", partial(self._warm, path), within=LOOK_TIMEOUT_SECONDS)

    def _warm(self, path: str) -> None:
        if self._kind() in IN_MEMORY:
            return
        with suppress(OSError, OpeningRefusedError, ChangedError), Folder(self._root, path) as folder:
            for name, file in folder.list().items():
                if name.endswith(".safetensors"):
                    with folder.open(name, file) as fd:
                        # The kernel reads one step ahead for each call, whatever its length (mm/readahead.c).
                        for begin in range(0, file.size, _STEP):
                            os.posix_fadvise(fd, begin, _STEP, os.POSIX_FADV_WILLNEED)


class BeforeLoad:
    """Checks and warms full versions, and deltas written in place, in their own folders; other deltas in their copies.

    Args:
        full: checks a full version.
        materializer: checks a copy.
        warmer: reads folders ahead.
        carriage: where engines load a version from.
    """

    def __init__(
        self,
        full: Callable[[VersionRecord], Awaitable[bool]],
        materializer: Materializer,
        warmer: Warmer,
        carriage: LoadableDeltas,
    ) -> None:
        self._full = full
        self._materializer = materializer
        self._warmer = warmer
        self._carriage = carriage

    async def check(self, version: VersionRecord, *, in_place: bool = False) -> bool:
        """As `refitd.update.reconciler.FilesCheck`."""
        is_copy = version.kind is Kind.DELTA and not in_place
        return await (self._materializer.check(version) if is_copy else self._full(version))

    async def warm(self, version: VersionRecord) -> None:
        """Read the files ahead, of versions and copies in the root."""
        path = self._carriage.path_of(version)
        if path is not None and not path.startswith("/"):
            await self._warmer.warm(path)
