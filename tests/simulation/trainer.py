"""The trainer of a world: it publishes in full and as deltas, hands over from its memory, restarts and dies."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from refitd.surface.present import present_engine
from refitd_client.contract.naming import Order, parse_version_folder, version_folder, version_id
from refitd_client.contract.states import Kind
from refitd_client.contract.wire import Notice
from refitd_client.delta.plan import last_served

from .disk import Make, SimFolder
from .offer import SimOffer

if TYPE_CHECKING:
    from .life import Life
    from .world import World

RUN = "run"
TAKEN_SECONDS = 20.0  # its patience
BACK_SECONDS = 10.0  # in which an engine that copies is to have ended


class SimTrainer:
    """One run's, one process at a time. `lent` is what it offers from its memory now."""

    def __init__(self, world: "World", contents: Iterator[int]) -> None:
        self._world, self._contents = world, contents
        self.generation, self.step = 1, 0
        self.trained: list[tuple[str, int]] = []  # what this process has published, with its contents
        self.lent: SimOffer | None = None

    def publish(self, make: Make, *, announce: bool) -> None:
        """The next step comes into its place."""
        self.take_back(announce=announce)
        self.step += 1
        order = Order(self.generation, self.step)
        folder = self._write(order, make)
        if make is Make.GOOD:
            self.trained.append((version_id(RUN, order), folder.content))
        else:
            self.trained.clear()  # what was written past the publisher it cannot lead on from
        if announce:
            self._announce_written(order, folder)

    def publish_delta(self, back: int, *, announce: bool, honest: bool) -> None:
        """The next step as a delta on what engines serve, or on one that is so far back. A liar's leads nowhere."""
        self.take_back(announce=announce)
        base = self._served() if back == 0 else self.trained[-back][0] if len(self.trained) >= back else None
        names = [name for name, _ in self.trained]
        if base not in names:
            self.publish(Make.GOOD, announce=announce)
            return
        self.step += 1
        order = Order(self.generation, self.step)
        path, content = f"{RUN}/{version_folder(order)}", next(self._contents)
        folder = self._world.disk.put(path, Make.DELTA, content)
        folder.base = base
        if honest:
            folder.onto = frozenset(content for _, content in self.trained[names.index(base) :])
        self._world.promises.published(path, order, folder)
        self.trained.append((version_id(RUN, order), content))
        if announce:
            self._announce_written(order, folder)

    def _announce_written(self, order: Order, folder: SimFolder) -> None:
        """As the publisher does it, which knows what it has written, and may wait for it when that is taken."""
        life = self._world.life
        if life is None:
            return
        path = f"{RUN}/{version_folder(order)}"
        kind = Kind.FULL if folder.base is None else Kind.DELTA
        digest = self._world.disk.digest(path)
        notice = Notice(run=RUN, step=order.step, path=path, kind=kind, base=folder.base, digest=digest)
        if self._world.call(self._tell(life, notice)) and digest is not None:
            self._world.promises.taken(path, order, folder.content)

    def _served(self) -> str | None:
        """As the publisher asks for it."""
        if self._world.life is None:
            return None
        ledger = self._world.life.ledger
        found = last_served([present_engine(each, ledger) for each in ledger.engines.values()], RUN)
        return found if isinstance(found, str) else None

    def publish_late(self, make: Make) -> None:
        """A step that is older than the newest, out of order."""
        self.take_back(announce=True)
        if self.step > 2:
            path = f"{RUN}/{version_folder(Order(self.generation, self.step - 2))}"
            if path not in self._world.disk.folders and not self._world.promises.was_there(path):
                self._write(Order(self.generation, self.step - 2), make)

    def begin_again(self, *, asked: bool) -> None:
        """Its root was emptied, and with it its own record: it begins at step 1. Where it could ask the service it
        begins a generation, else it uses names again that the service may know.
        """
        self.die()
        if asked:
            self.generation += 1
        self.step = 0

    def restart(self) -> None:
        """It starts again at an earlier step: a new generation."""
        self.die()
        self.generation += 1
        self.step = self.step // 2
        self.trained.clear()

    def hand_over(self) -> None:
        """The next step is offered from the trainer's memory. Where the service does not hear of it, it is written."""
        self.take_back(announce=True)
        self.step += 1
        order = Order(self.generation, self.step)
        path, content = f"{RUN}/{version_folder(order)}", next(self._contents)
        name = f".offer-{content:016x}"
        self.lent = SimOffer(f"{RUN}/{name}", version_id(RUN, order), path, content, content)
        self._world.disk.offers[self.lent.name] = self.lent
        self.trained.clear()  # no delta leads on from it
        self._world.promises.lent(path, order, content)
        life, notice = self._world.life, Notice(run=RUN, step=order.step, path=path, kind=Kind.HANDOVER, offer=name)
        told = life is not None and self._world.call(self._tell(life, notice))
        if not told:
            self.take_back(announce=True)

    def take_back(self, *, announce: bool, fails: bool = False) -> None:
        """The trainer waits for engines, has its tensors back, and goes on with them; the files follow, or fail."""
        offer = self.lent
        if offer is None:
            return
        self._until(lambda: not self._is_offered(offer), TAKEN_SECONDS)
        offer.is_lent = False
        self._until(lambda: not offer.readers, BACK_SECONDS)
        offer.content = next(self._contents)
        self.lent = None
        order = parse_version_folder(offer.path.rpartition("/")[2])
        assert order is not None
        if fails:
            self._say_that_it_failed(offer, order)
            return
        self._write(order, Make.GOOD, offer.promised)
        if announce:
            self.announce(order.step)

    def _say_that_it_failed(self, offer: SimOffer, order: Order) -> None:
        life = self._world.life
        if life is not None:
            notice = Notice(run=RUN, step=order.step, path=offer.path, kind=Kind.HANDOVER, failed="EIO")
            self._world.call(self._tell(life, notice))

    def die(self) -> None:
        """It dies, and its memory with it."""
        if self.lent is not None:
            self.lent.is_lent, self.lent.content = False, next(self._contents)
            self.lent = None
        self.trained.clear()

    async def _tell(self, life: "Life", notice: Notice) -> None:
        record, _ = await life.intake.take(notice)
        self._world.promises.noticed(record.id)

    def _is_offered(self, offer: SimOffer) -> bool:
        if self._world.life is None:
            return False
        record = self._world.life.ledger.versions.get(offer.version)
        return record is not None and self._world.life.ledger.is_offered(record)

    def _until(self, done: Callable[[], bool], seconds: float) -> None:
        end = self._world.loop.time() + seconds
        while not done() and self._world.loop.time() < end:
            self._world.wait(0.05)

    def _write(self, order: Order, make: Make, content: int | None = None) -> SimFolder:
        path = f"{RUN}/{version_folder(order)}"
        content = next(self._contents) if content is None else content
        folder = self._world.disk.recycle(path, make, content) or self._world.disk.put(path, make, content)
        self._world.promises.published(path, order, folder)
        return folder

    def announce(self, step: int, base: str | None = None) -> None:
        """A notice; what is answered with 2xx is remembered as promised."""
        if self._world.life is not None:
            kind = Kind.FULL if base is None else Kind.DELTA
            self._world.call(self._tell(self._world.life, Notice(run=RUN, step=step, kind=kind, base=base)))
