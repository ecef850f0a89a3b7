"""One process of the service, from its start to its kill, between a world's made-up disk and servers.

A kill stops it dead: nothing of it acts any more, not even what it would do on its way out; what the journal had
committed is what the next one finds.
"""

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import OperationalError

from refitd.api.context import Service
from refitd.catalog.catalog import Catalog
from refitd.catalog.examining import References
from refitd.catalog.intake import Intake
from refitd.engine.port import EnginePort
from refitd.engine.registry import EngineSpec
from refitd.reclaim.books import Books
from refitd.reclaim.sweep import Collector
from refitd.state.decisions import DecisionFile
from refitd.state.journal.journal import Journal
from refitd.state.journal.rows import JournalWrite
from refitd.state.store import Store
from refitd.update.controller import CanaryChecks, UpdateController
from refitd.update.fleet import Fleet
from refitd.update.proving import RankProofs
from refitd.update.targets import Targets
from refitd_hosts.follow.follower import UpstreamFollower
from refitd_hosts.hub.hub import Hub
from refitd_inside.materialize.materializer import Materializer

from .copies import SimCopies
from .disk import SimFiles, templates
from .orders import LOAD_TIMEOUT
from .server import MOUNT

if TYPE_CHECKING:
    from .place import Place


class _Journal(Journal):
    """A journal whose process can be killed, and whose disk can be full."""

    def __init__(self, folder: Path, life: "Life") -> None:
        super().__init__(folder)
        self._life = life

    async def _commit_queued(self) -> None:
        if self._life.alive:  # else not even what it would do on its way out
            await super()._commit_queued()

    def _commit(self, batch: list[JournalWrite]) -> Exception | None:
        if not self._life.alive or self._life.world.journal_full:
            return OperationalError("", {}, Exception("database or disk is full"))
        return super()._commit(batch)


class Life:
    """One process of the service, from its start to its kill."""

    def __init__(self, world: "Place") -> None:
        self.world = world
        self.alive = True
        self.journal = _Journal(world.state, self)
        self.store = Store(self.journal, world.clock)
        self.targets = Targets(self.store, world.strategy, follows=world.follows)
        self.decisions = DecisionFile(self.store, world.own_root, self._on_root)
        self.store.observe(world.promises, self.decisions)
        settings = world.settings
        files = SimFiles(world.disk, self._pause)
        proofs = RankProofs(self.store, self.targets, settings.prove)
        self.catalog = Catalog(self.store, files, _Base(self.store), settings.catalog_rules, proofs)
        self.follower: UpstreamFollower | None = None
        self.led = world.leading(self)
        self.hosts = Hub(self.store, self.led)
        facts = self._facts(files)
        copies = SimCopies(
            world.disk,
            self._pause,
            given_up=world.promises.copy_is_given_up,
            before_discard=world.promises.before_copy_goes,
            made=world.promises.copy_made,
        )
        self.materializer = Materializer(self.store, self.targets, facts, copies)
        self.fleet = Fleet(
            self.store,
            self.targets,
            root=MOUNT,
            urls=world.urls,
            engines_file=None,
            probe_interval=settings.probe_interval,
            connect=self._connector(),
            check=self.materializer.checking(self.catalog.check),
            prove=self.catalog.read,
            proofs=proofs,
            chance=random.Random(world.chance.random()),
        )
        if self.led is not None:
            self.led.tell = self.fleet.reported
        self.follower = self.hosts.follower = world.follow(self)
        self.swept = SimFiles(world.disk, self._pause)
        folders = world.folders(self._pause)
        self.collector = Collector(
            self.store, self._facts(self.swept), folders, settings.reclaim_rules, self.materializer
        )
        self.intake = Intake(self.store, self.targets, files, Path(MOUNT), self.catalog.nudge)
        self.controller = UpdateController(self.store, self.targets, default_run=None, quorum=1)
        self.canaries = CanaryChecks(self.store, self.targets, [self.fleet.trial])
        self.service = Service(
            values=settings.api_values,
            store=self.store,
            targets=self.targets,
            intake=self.intake,
            fleet=self.fleet,
            sweeper=self.collector.sweeper,
            copies=self.materializer,
            hosts=self.hosts,
            follower=self.follower,
            decisions=self.decisions,
        )
        self._task = world.loop.create_task(self._run())

    def _connector(self) -> Callable[[EngineSpec], EnginePort]:
        def connect(spec: EngineSpec) -> EnginePort:
            return self.world.connect(spec, self)

        return connect if self.led is None else self.led.connector(connect, root=MOUNT, load_timeout=LOAD_TIMEOUT)

    def _facts(self, files: SimFiles) -> Books:
        return Books(
            self.store,
            self.targets,
            files,
            self.catalog.judging,
            pulling=self.hosts.followers.pulled,
            upstream=lambda: frozenset() if self.follower is None else self.follower.needs,
            pushing=self.world.uploading,
        )

    async def _on_root(self, _: str, call: Callable[[], None]) -> None:
        await self._pause()
        if self.world.disk.fault is not None or self.world.disk.no_room:
            raise OSError(28, "No space left on device")
        call()

    async def _pause(self) -> None:
        """The time that a look at the disk takes. A dead process looks at nothing."""
        await asyncio.sleep(self.world.chance.random() * 0.003)
        if not self.alive:
            raise asyncio.CancelledError

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            parts = (self.catalog, self.controller, self.canaries, self.collector, self.materializer, self.fleet)
            more = [part for part in (self.led, self.follower) if part is not None]
            for part in (self.journal, self.decisions, *parts, *more):
                group.create_task(part.run())

    async def kill(self) -> None:
        self.alive = False
        self._task.cancel()
        with suppress(asyncio.CancelledError, BaseExceptionGroup):
            await self._task
        self.journal.close()

    def check(self) -> None:
        if self._task.done():
            self._task.result()


class _Base(References):
    """The model that checkpoints are held against, without a disk."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, None)

    async def of(self, run: str) -> Any:
        return templates()[0]
