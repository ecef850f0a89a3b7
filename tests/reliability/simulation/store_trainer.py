"""Trainers that publish into a store, and people who collect from it: processes that are opened, killed and gone."""

import asyncio
import random
import shutil
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refitd.state.version import VersionRecord
from refitd_client.bucket.collection import BucketCollection, collect_run
from refitd_client.bucket.pointer import BucketVersion
from refitd_client.bucket.run import BucketRun
from refitd_client.bucket.target import BucketTarget
from refitd_client.contract.naming import MANIFEST_NAME, Order, version_folder, version_id
from refitd_client.contract.states import VersionState
from refitd_client.errors import BucketError, RunBusyError
from refitd_client.publish.run_folder import RunFolder
from refitd_hosts.push.pusher import _as_here

from .disk import Make, SimFolder, bytes_of, seen_at
from .sim_bucket import SimBucket

if TYPE_CHECKING:
    from .store_world import StoreWorld

RUN = "run"
KEEP = 2  # versions that a publisher keeps in the store


class StoreProcess:
    """A process at the end of a way of its own to the store: it does one thing at a time, and is killed in it."""

    def __init__(self, world: "StoreWorld") -> None:
        self.world = world
        self.client = SimBucket(world.store, random.Random(world.chance.random()))
        self.task: asyncio.Task[None] | None = None

    @property
    def is_busy(self) -> bool:
        return self.task is not None and not self.task.done()

    def do(self, work: Coroutine[Any, Any, None]) -> None:
        assert not self.is_busy
        self.task = self.world.loop.create_task(work)

    def check(self) -> None:
        if self.task is not None and self.task.done() and not self.task.cancelled():
            self.task.result()

    def kill(self) -> None:
        self.client.alive = False
        if self.task is not None:
            self.task.cancel()
            self.world.loop.run_until_complete(asyncio.wait([self.task]))


class SimTarget(BucketTarget):
    """The product's own, without its thread: what that would do is awaited here, in virtual time."""

    def __init__(self, client: SimBucket, writer: str, *, steers: bool) -> None:
        self._bucket = client
        self._run = BucketRun(client, RUN, keep=KEEP, steers=steers)
        self._run.writer = writer  # its own has the host's name and a random word
        self._collection: asyncio.Task[None] | None = None
        self._collected = 0.0

    @property
    def run(self) -> BucketRun:
        return self._run

    async def opened(self, folder: RunFolder) -> None:
        await self._run.begin()
        self.begin(folder)

    async def used(self, order: Order) -> bool:
        return await self._run.is_used(order)

    async def uploaded(self, folder: Path, data: bytes) -> None:
        await self._publish(folder, data)

    async def ended(self) -> None:
        await self._end_collection()

    def _do(self, call: Coroutine[Any, Any, Any]) -> None:  # type: ignore[override]
        call.close()  # it was awaited before


class StoreTrainer(StoreProcess):
    """A process of a trainer. As the publisher it places a step, writes the version into a local folder (`spool`, which
    stays for the next process), and uploads it. `steers`: it also says what is to be served, as a hub that pushes.

    The publisher itself makes files from tensors, by threads; here files are made up, and put there at once.
    """

    def __init__(self, world: "StoreWorld", spool: Path, name: str, *, step: int, steers: bool) -> None:
        super().__init__(world)
        self.name = name
        self.step = step
        self.steers = steers
        self.folder = RunFolder(spool, RUN)
        self.target: SimTarget | None = None
        self.is_lost = False  # whether it has said that another one has the run
        self.has_failed = False  # whether what it did last was not carried out
        self.rots = False  # whether a byte of what it writes next changes before it is uploaded
        self._last: tuple[str, int] | None = None

    def kill(self) -> None:
        super().kill()
        if self.target is not None:
            self.world.loop.run_until_complete(self.target.ended())
        self.folder.lock.release()

    def publish(self, *, delta: bool) -> None:
        """Begin to publish the next step, in full or as a delta on the one before."""
        self.do(self._told(lambda: self._publish(delta=delta)))

    def roll_back(self) -> None:
        self.do(self._told(self._roll_back))

    async def _told(self, work: Callable[[], Awaitable[None]]) -> None:
        self.has_failed = True
        try:
            await work()
        except RunBusyError:
            self.world.store.counts["publishers refused"] += 1
            self.is_lost = True
        except BucketError:
            self.world.store.counts["publications failed"] += 1
        else:
            self.has_failed = False

    async def _opened(self) -> SimTarget:
        if self.target is None:
            target = SimTarget(self.client, self.name, steers=self.steers)
            await target.opened(self.folder)
            self.target = target
        return self.target

    async def _publish(self, *, delta: bool) -> None:
        target = await self._opened()
        was_lost = self.name in self.world.watch.lost
        self.step += 1
        order = self.folder.place(self.step)
        if not self.folder.is_begun:
            while await target.used(order):
                self.folder.note_known(order)
                order = self.folder.place(self.step)
        content = next(self.world.contents)
        version = self._made(content, delta=delta)
        last, self._last = (version_id(RUN, order), content), None
        where, data = self._written(order, version)
        try:
            await target.uploaded(where, data)
        except BaseException:
            if self.client.alive:
                self.folder.withdrawn(order)
                shutil.rmtree(where)
            raise
        shutil.rmtree(where)
        assert not was_lost, f"{self.name} had lost the run, and publishes {last[0]}"
        assert last[0] in self.world.watch.counted, f"{last[0]} is published, and no pointer has named it"
        self._last = last
        if self.steers:
            await self._say(last[0])

    def _made(self, content: int, *, delta: bool) -> SimFolder:
        assert self.target is not None
        if delta and self._last is not None and self.target.base() == self._last[0]:
            base, onto = self._last
            return SimFolder(0, Make.DELTA, content, base=base, onto=frozenset({onto}))
        return SimFolder(0, Make.GOOD, content)

    def _written(self, order: Order, version: SimFolder) -> tuple[Path, bytes]:
        path = f"{RUN}/{version_folder(order)}"
        manifest = seen_at(path, version).structure.manifest
        assert manifest is not None
        where, data = self.folder.folder_of(order), manifest.to_json()
        where.mkdir()
        self.folder.record(order, where)
        for name in manifest.files:
            (where / name).write_bytes(bytes_of(version.make, name, version.content))
        if self.rots:
            rotten = where / max(manifest.files)
            rotten.write_bytes(bytes([rotten.read_bytes()[0] ^ 1]) + rotten.read_bytes()[1:])
            self.rots = False
        (where / MANIFEST_NAME).write_bytes(data)
        self.folder.published(order)
        self.world.known.note(path, manifest, version)
        return where, data

    async def _roll_back(self) -> None:
        run = (await self._opened()).run
        good = [] if run.pointer is None else [each for each in run.pointer.versions if not each.barred]
        if self.steers and len(good) > 1:
            await self._say(good[1].id, barred=good[0])

    async def _say(self, wanted: str, barred: BucketVersion | None = None) -> None:
        """Move the pointer as a hub that pushes (`Pusher`), which mirrors what it knows of versions."""
        assert self.target is not None
        run = self.target.run
        known = [] if run.pointer is None else run.pointer.versions
        change = _as_here({each.id: _record_of(each, barred) for each in known}, wanted)
        if run.pointer is not None and change(run.pointer) != run.pointer:
            await run.move(change)


def _record_of(version: BucketVersion, barred: BucketVersion | None) -> VersionRecord:
    return VersionRecord(
        run=RUN,
        order=version.order,
        path=f"{RUN}/{version_folder(version.order)}",
        state=VersionState.SEALED,
        created_at="",
    ).having(digest=version.digest, pinned=version.pinned, barred=version.barred or version is barred)


class StoreCollector(StoreProcess):
    """Somebody who collects in the place of a run's publisher. `done` is what came of it, if it was not killed."""

    def __init__(self, world: "StoreWorld") -> None:
        super().__init__(world)
        self.done: BucketCollection | None = None

    def collect(self, *, keep: int | None, dry: bool) -> None:
        self.do(self._collect(keep, dry=dry))

    async def _collect(self, keep: int | None, *, dry: bool) -> None:
        with suppress(BucketError):
            self.done = await collect_run(self.client, RUN, keep=keep, dry=dry)
            self.world.store.counts["collections"] += 1
            self.world.store.counts["collected"] += len(self.done.deleted) * (not dry)
