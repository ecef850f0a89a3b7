"""A service with a trainer on its root that pushes what it has found good into a store: the product's own pusher."""

import asyncio
import random
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refitd.api.operations import rollback
from refitd_client.contract.naming import INCOMING_PREFIX, MANIFEST_NAME, Order, version_folder, version_id
from refitd_client.contract.wire import Rollback
from refitd_hosts.push.pusher import Pusher

from .disk import Make, Pause, SimFolder, bytes_of, seen_at
from .host_disk import HostDisk, HostFolders
from .place import Place
from .sim_bucket import SimBucket

if TYPE_CHECKING:
    from .store_world import StoreWorld

RUN = "run"
KEEP = 2  # versions that a hub keeps in the store


class StoreHub(Place):
    """A hub that pushes. Its trainer writes whole versions into the root at once; `step` is the last of them."""

    name = "pushing"
    disk: HostDisk

    def __init__(self, world: "StoreWorld", vllm: str) -> None:
        self.world = world
        self.client = SimBucket(world.store, random.Random(world.chance.random()))
        state = world.state / self.name
        state.mkdir()
        super().__init__(
            world.loop,
            random.Random(world.chance.random()),
            state=state,
            disk=HostDisk(state, world.known),
            strategy=world.strategy,
        )
        self.pusher: Pusher | None = None
        self.task: asyncio.Task[None] | None = None
        self.order = Order(1, 0)
        self.written: set[tuple[str, str]] = set()  # versions' ids and digests
        self._last: tuple[str, int] | None = None
        self._add_servers("a", vllm)

    def folders(self, pause: Pause) -> Any:
        return HostFolders(self.disk, pause, self.promises.before_discard, self.promises.before_recycling)

    def uploading(self) -> Collection[str]:
        return frozenset() if self.pusher is None else self.pusher.uploading

    def start(self) -> None:
        if self.life is None:
            super().start()
            assert self.life is not None
            before, self.client = self.client, SimBucket(self.world.store, random.Random(self.chance.random()))
            self.client.cut = before.cut
            root: Path = self.disk.root
            self.pusher = Pusher(self.life.store, self.life.targets, root, self.client, keep=KEEP)
            self.task = self.loop.create_task(self.pusher.run())

    def kill(self) -> None:
        """See `Place`. Nothing that it does on its way out changes its root."""
        if self.life is not None:
            assert self.task is not None
            self.life.alive = self.client.alive = False
            self.disk.process_ends()
            self.task.cancel()
            with suppress(asyncio.CancelledError):
                self.loop.run_until_complete(self.task)
        super().kill()

    def check(self) -> None:
        if self.life is not None and self.task is not None and self.task.done():
            self.task.result()

    def mend(self) -> None:
        self.client.mend()
        super().mend()

    @property
    def is_lost(self) -> bool:
        return self.pusher is not None and RUN in self.pusher._lost

    @property
    def has_pushed(self) -> bool:
        return version_id(RUN, self.order) in self.world.watch.counted

    @property
    def has_failed(self) -> bool:
        return not self.has_pushed

    @property
    def is_busy(self) -> bool:
        return self.life is not None and not self.has_pushed and not self.is_lost

    def publish(self, *, delta: bool) -> None:
        """The next step comes into its place, in full or as a delta on the one before."""
        self.order = Order(self.order.generation, self.order.step + 1)
        content = next(self.world.contents)
        version = SimFolder(0, Make.GOOD, content)
        if delta and self._last is not None:
            version = SimFolder(0, Make.DELTA, content, base=self._last[0], onto=frozenset({self._last[1]}))
        path = f"{RUN}/{version_folder(self.order)}"
        manifest = seen_at(path, version).structure.manifest
        assert manifest is not None
        where = self.disk.root / RUN / f"{INCOMING_PREFIX}{self.order.step}"
        where.mkdir(parents=True)
        for name in manifest.files:
            (where / name).write_bytes(bytes_of(version.make, name, content))
        (where / MANIFEST_NAME).write_bytes(manifest.to_json())
        self.world.known.note(path, manifest, version)
        self.promises.published(path, self.order, version)
        where.rename(self.disk.root / path)
        self._last = version_id(RUN, self.order), content
        self.written.add((self._last[0], manifest.digest))

    def roll_back(self) -> None:
        if self.life is not None:
            self._call(rollback(Rollback(run=RUN), self.life.service))

    def lose_files(self) -> None:
        """Somebody deletes the folder of the version that was published last, if the store has it."""
        if self.has_pushed:
            shutil.rmtree(self.disk.root / RUN / version_folder(self.order), ignore_errors=True)
            self._last = None  # no delta can be checked against it any more

    def restart_trainer(self, *, back: int) -> None:
        """It goes on from a checkpoint of so many steps before, in a new generation."""
        self.order = Order(self.order.generation + 1, max(0, self.order.step - back))
        self._last = None

    def overtake(self, newest: Order | None) -> None:
        """Its trainer begins a generation after all that counts in the store."""
        if newest is not None and newest >= self.order:
            self.order = Order(newest.generation + 1, self.order.step)
            self._last = None
