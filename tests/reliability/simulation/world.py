"""The whole service in virtual time, between a made-up disk and made-up engines; what may happen to it; what must hold.

The parts are the product's: catalog, intake, reconciler, adapter, sweep, store and journal (real SQLite, in a folder in
memory). Made up are time, the disk and the servers.
"""

import asyncio
import itertools
import random
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from refitd.api.engines import move_engines
from refitd.api.operations import change_run, rollback
from refitd.api.versions import pin, unpin, wait
from refitd.explain.present import present_engine
from refitd.explain.run import glance_at
from refitd.policy.strategy import Strategy, StrategyName
from refitd.problem import ProblemError
from refitd_client.contract.naming import Order, parse_version_folder, version_folder, version_id
from refitd_client.contract.states import EngineState, Kind, Standing
from refitd_client.contract.wire import Move, NewEngine, Notice, Rollback, RunChange
from refitd_client.delta.change import last_served

from .disk import Make, SimDisk, SimFolder
from .life import Life
from .offer import Sending, SimOffer
from .place import ADDED, PARTNER, Place, url_of
from .plugin import SimPlugin
from .promises import AT_ONCE
from .server import SimServer
from .virtual_time import VirtualLoop

RUN = "run"
OTHER_RUN = "other"
NAMES = ("a", "b", ADDED)  # of the engines
START_SECONDS = 10.0  # SGLang takes longer to start; the service looks several times meanwhile
TAKEN_SECONDS = 20.0  # a trainer's patience
BACK_SECONDS = 10.0  # in which an engine that copies is to have ended
LOOK_SECONDS = 0.2  # between two looks at what should hold at any time; servers are looked at whenever they change


class World(Place):
    """A simulation. Two engines are named by settings, a third comes and goes; each has refitd's plugin or not.
    Everything that is left to chance follows from `seed`. `waits`: the trainer says what it has written, and waits.
    `vllm` holds the names of the engines that are vLLM; the others are SGLang. `pair`: engine `a` is a unit of two
    servers, one of which prefills for the other. `plugged`: whether each engine has the plugin; None: by chance.
    """

    has_hub = True  # whether a service runs beside the trainer
    heal_seconds: tuple[float, ...] = (120.0, 120.0)  # after which engines that have died meanwhile are started again

    def __init__(
        self,
        seed: int,
        *,
        strategy: StrategyName = StrategyName.ALL,
        waits: bool = False,
        vllm: str = "",
        pair: bool = False,
        plugged: bool | None = None,
    ) -> None:
        self.waits = waits
        chance = random.Random(seed)
        loop = VirtualLoop(random.Random(chance.random()))
        asyncio.set_event_loop(loop)
        self._folder = tempfile.TemporaryDirectory(prefix="refitd-sim-", dir=_memory())
        state = Path(self._folder.name)
        super().__init__(loop, chance, state=state, disk=SimDisk(), strategy=Strategy(name=strategy))
        self._add_servers([*NAMES, *([PARTNER] if pair else [])] if self.has_hub else [], vllm)
        for server in self.servers.values() if plugged is not None else []:
            server.plugged, server.plugin = plugged, SimPlugin(server) if plugged else None
        if pair:
            self.servers["a"].partner, self.servers["a"].role = self.servers[PARTNER], "prefill"
            self.servers[PARTNER].role = "decode"
        self.lent: SimOffer | None = None
        self.generation, self.step = 1, 0
        self.trained: list[tuple[str, int]] = []  # what the trainer that runs now has published, with its contents
        self._contents = itertools.count(1)
        self.places: list[Place] = [self] if self.has_hub else []
        self.life = Life(self) if self.has_hub else None
        self.log: list[str] = []
        self._others: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        self.kill()
        for server in self.servers.values():
            server.die()
        self.loop.run_until_complete(asyncio.sleep(1.0))
        asyncio.set_event_loop(None)
        self.loop.close()
        self._folder.cleanup()

    # What may happen. Each is one step.

    def wait(self, seconds: float) -> None:
        self.loop.run_until_complete(self._wait(seconds))
        self.hold()

    def hold(self) -> None:
        for place in self.places:
            place.promises.hold()

    async def _wait(self, seconds: float) -> None:
        end = self.loop.time() + seconds
        while self.loop.time() < end:
            await asyncio.sleep(min(LOOK_SECONDS, max(end - self.loop.time(), 1e-3)))
            for place in self.places:
                place.promises.hold_now()
                if place.life is not None:
                    place.life.check()

    def publish(self, make: Make, *, announce: bool, then: float | None = None) -> None:
        self.take_back(announce=announce)
        self.step += 1
        order = Order(self.generation, self.step)
        folder = self._write(order, make)
        if make is Make.GOOD:
            self.trained.append((version_id(RUN, order), folder.content))
        else:
            self.trained.clear()  # what was written past the publisher it cannot lead on from
        if announce:
            self._announce_written(order, folder) if self.waits else self.announce(self.step)
        if then is not None:
            self.wait(then)

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
        folder = self.disk.put(path, Make.DELTA, content)
        folder.base = base
        if honest:
            folder.onto = frozenset(content for _, content in self.trained[names.index(base) :])
        self.promises.published(path, order, folder)
        self.trained.append((version_id(RUN, order), content))
        if announce:
            self._announce_written(order, folder) if self.waits else self.announce(self.step, base)

    def _announce_written(self, order: Order, folder: SimFolder) -> None:
        """As the publisher does it, which knows what it has written, and may wait for it when that is taken."""
        if self.life is None:
            return
        path = f"{RUN}/{version_folder(order)}"
        kind = Kind.FULL if folder.base is None else Kind.DELTA
        digest = self.disk.digest(path)
        notice = Notice(run=RUN, step=order.step, path=path, kind=kind, base=folder.base, digest=digest)
        if self._call(self._tell(self.life, notice)) and digest is not None:
            self.promises.taken(path, order, folder.content)

    def _served(self) -> str | None:
        if self.life is None:
            return None
        store, targets = self.life.store, self.life.targets
        found = last_served([present_engine(each, store, targets) for each in store.engines.values()], RUN)
        return found if isinstance(found, str) else None

    def publish_late(self, make: Make) -> None:
        self.take_back(announce=True)
        if self.step > 2:
            path = f"{RUN}/{version_folder(Order(self.generation, self.step - 2))}"
            if path not in self.disk.folders and path not in self.promises.orders:
                self._write(Order(self.generation, self.step - 2), make)

    def restart_trainer(self) -> None:
        self.kill_trainer()
        self.generation += 1
        self.step = self.step // 2
        self.trained.clear()

    def empty_root(self, *, asked: bool, whole: bool) -> None:
        """The runs in the root are gone, the trainer's own record as well; the journal is kept. It begins at step 1:
        in a new generation where it could ask the service, else with names that the service may know. Names that were
        handed over from memory it has no second time: nothing but its own record tells their contents apart.

        A service that runs believes nothing of a root that lost the service's own folder: the whole of it goes while
        none runs.
        """
        self.take_back(announce=True)
        if whole:
            self.kill()
        self.disk.clear(whole=whole)
        self.start()
        self.kill_trainer()
        if asked or self.promises.lent_at:
            self.generation += 1
        self.step = 0

    def hand_over(self, *, files: bool = True, sending: Sending | None = None) -> None:
        """The next step is offered from the trainer's memory. Where the service does not hear of it, it is written.

        Without `files` it has none where all engines take it. `sending`: a process group brings it to the engines.
        """
        self.take_back(announce=True)
        self.step += 1
        order = Order(self.generation, self.step)
        path, content = f"{RUN}/{version_folder(order)}", next(self._contents)
        name = f".offer-{content:016x}"
        self.lent = SimOffer(f"{RUN}/{name}", version_id(RUN, order), path, content, content, files, sending)
        self.disk.offers[self.lent.name] = self.lent
        self.trained.clear()  # no delta leads on from it
        self.promises.lent(path, order, content)
        said = {} if files else {"durable": "never"}
        said |= {} if sending is None else {"transport": "gloo"}
        notice = Notice(run=RUN, step=order.step, path=path, kind=Kind.HANDOVER, offer=name, metadata=said)
        life = self.life
        told = life is not None and self._call(self._tell(life, notice))
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
        step = parse_version_folder(offer.path.rpartition("/")[2])
        assert step is not None
        if fails:
            life, notice = self.life, Notice(run=RUN, step=step.step, path=offer.path, kind=Kind.HANDOVER, failed="EIO")
            if life is not None:
                self._call(self._tell(life, notice))
            return
        if not offer.files and self._is_taken_by_all(offer.version):
            self.disk.counts["in memory alone"] += 1
            return
        self._write(step, Make.GOOD, offer.promised)
        if announce:
            self.announce(step.step)

    def kill_trainer(self) -> None:
        """It dies, and its memory with it. It has left what it was writing; the next one begins another version."""
        self.disk.incoming = dict.fromkeys(self.disk.incoming, False)
        self.disk.incoming[f"{RUN}/.incoming-{self.disk.inode()}"] = True
        if self.lent is not None:
            self.lent.is_lent, self.lent.content = False, next(self._contents)
            self.lent = None
        self.trained.clear()

    async def _tell(self, life: Life, notice: Notice) -> None:
        record, _ = await life.intake.take(notice)
        self.promises.noticed(record.id)

    def _is_offered(self, offer: SimOffer) -> bool:
        if self.life is None:
            return False
        record = self.life.store.versions.get(offer.version)
        return record is not None and self.life.targets.is_offered(record)

    @property
    def target_is_in_memory(self) -> bool:
        target = None if self.life is None else self.life.targets.of_run(RUN).target
        return target is not None and target.in_memory

    def _is_taken_by_all(self, version: str) -> bool:
        told = None if self.life is None else self.ask(wait(version, self.life.service, AT_ONCE, "taken", 0.0))
        engines = [] if told is None else told.version.engines
        return told is not None and not told.followers and bool(engines) and all(each.serves for each in engines)

    def _until(self, done: Callable[[], bool], seconds: float) -> None:
        end = self.loop.time() + seconds
        while not done() and self.loop.time() < end:
            self.wait(0.05)

    def _write(self, order: Order, make: Make, content: int | None = None) -> SimFolder:
        path = f"{RUN}/{version_folder(order)}"
        content = next(self._contents) if content is None else content
        folder = self.disk.recycle(path, make, content) or self.disk.put(path, make, content)
        self.promises.published(path, order, folder)
        return folder

    def announce(self, step: int, base: str | None = None) -> None:
        if self.life is not None:
            kind = Kind.FULL if base is None else Kind.DELTA
            self._call(self._tell(self.life, Notice(run=RUN, step=step, kind=kind, base=base)))

    def roll_back(self) -> None:
        if self.life is not None:
            self._call(rollback(Rollback(run=RUN), self.life.service))

    def pin(self, index: int, *, pinned: bool) -> None:
        if self.life is not None and (versions := sorted(self.life.store.versions)):
            change = pin if pinned else unpin
            self._call(change(versions[index % len(versions)], self.life.service))

    def resync(self, name: str) -> None:
        """An operator asks for a load, and may be told that it would go backwards."""
        if self.life is not None and f"{name}:1" in self.life.store.engines:
            with suppress(ProblemError):
                self.life.fleet.resync(f"{name}:1")

    def move_engine(self, name: str, *, away: bool) -> None:
        """An operator moves an engine to a run that publishes nothing, or back."""
        if self.life is not None:
            order = Move(engines=[f"{name}:1"], run=OTHER_RUN if away else RUN, insist=True)
            self._call(move_engines(order, self.life.service))

    def close_run(self, *, closed: bool) -> None:
        """Somebody says that the run has ended, or that it has not: what is published next says so, too."""
        if self.life is not None:
            self._call(change_run(RunChange(run=RUN, closed=closed), self.life.service))

    def name_engine(self, *, named: bool) -> None:
        """An operator adds the third engine, or takes it out, whatever it is at."""
        if self.life is None:
            return
        with suppress(ProblemError):
            if named:
                self.life.fleet.add(NewEngine(url=url_of(ADDED), run=RUN))
            else:
                self.life.fleet.remove(f"{ADDED}:1")
                self.promises.removed(f"{ADDED}:1")

    def relabel(self, name: str) -> None:
        self.servers[name].label = "somebody else's"

    def write_as_another(self, name: str) -> None:
        """Another service, a trainer or a script loads weights into an engine."""
        content = next(self._contents)
        self.promises.written_by_another(content)
        server = self.servers[name]
        task = self.loop.create_task(server.is_written_by_another(content))
        self._others.add(task)
        task.add_done_callback(self._others.discard)

    def lie(self, name: str, *, lies: bool) -> None:
        """An engine gives wrong checksums of what it holds, or right ones again."""
        self.servers[name].lies = lies

    def is_served_by_all_but(self, name: str) -> bool:
        assert self.life is not None
        target, engines = self.life.targets.of_run(RUN).target, self.life.store.engines
        assert target is not None
        return all(
            engine.state is EngineState.QUARANTINED if id_ == f"{name}:1" else engine.serving == target.id
            for id_, engine in engines.items()
        )

    def take_away_newest(self, how_many: int) -> None:
        for path in sorted(self.disk.folders, key=self.promises.orders.__getitem__, reverse=True)[:how_many]:
            self.disk.remove(path)

    def take_away(self, index: int) -> None:
        if paths := sorted(self.disk.folders):
            self.disk.remove(paths[index % len(paths)])

    def restore(self, index: int) -> None:
        """What lies there, or was deleted by its trainer, is put back byte for byte."""
        if paths := sorted({*self.disk.folders, *self.disk.backup}):
            self.disk.restore(path := paths[index % len(paths)])
            self.promises.restored(path)

    def rewrite(self, index: int, make: Make) -> None:
        paths = sorted(self.disk.folders)
        if paths:
            path = paths[index % len(paths)]
            self.disk.rewrite(path, make, next(self._contents))
            self.promises.rewritten(path)

    def heal(self) -> None:
        """Everything works again, and time passes: then everything must be as it should."""
        self.take_back(announce=True)
        self.disk.incoming = dict.fromkeys(self.disk.incoming, False)
        for place in self.places:
            place.mend()
        for seconds in self.heal_seconds:  # a fault that was under way may still kill one
            for place in self.places:
                place.start_what_is_dead()
            for name in self.servers:
                self.move_engine(name, away=False)
            self.close_run(closed=False)
            self.wait(seconds)
        tended: set[str] = set()  # each engine is tended once: what is found again after that is a failure
        # One may be found broken only after another was restarted, or be given up only after several slow loads.
        for _ in range(9):
            if True not in [self._tend(place, tended) or place.repairs for place in self.places]:
                break
            self.wait(self.heal_seconds[-1])
        self._end_lies_on_record()
        self.wait(self.heal_seconds[0])
        for place in self.places:
            place.promises.hold_in_the_end()

    def _end_lies_on_record(self) -> None:
        """As the runbook says, the next version and a restart do."""
        given_up = [(place, each) for place in self.places for each in place.given_up_for_a_lie()]
        if given_up:
            self.publish(Make.GOOD, announce=True)
            self._restart([place.server_of(each) for place, each in given_up])
            self.wait(self.heal_seconds[-1])

    def _tend(self, place: Place, tended: set[str]) -> bool:
        """Do what alerts ask an operator to do for a host's engines; whether any asked that had not asked before."""
        assert place.life is not None
        waiting = [each for each in place.life.store.engines.values() if place.wants_operator(each, tended)]
        tended.update(f"{place.name} {each.id} {each.state}" for each in waiting)
        for each in waiting:
            if place.is_held(each):
                place.server_of(each).is_resumed()
        given_up = [each for each in waiting if each.state is EngineState.QUARANTINED and not place.leads(each)]
        if given_up:
            self._restart([place.server_of(each) for each in given_up])
        for each in waiting:
            if each.state is EngineState.CONTESTED or place.leads(each):
                place.promises.is_seen(each)
                place.life.fleet.resync(each.id)
        return bool(waiting)

    def _restart(self, servers: Sequence[SimServer]) -> None:
        """As an operator would, told by the alert. One that was not seen to be away is not seen to be a new one."""
        for server in servers:
            server.die()
        self.wait(START_SECONDS)
        for server in servers:
            server.start()

    @property
    def standing(self) -> Standing:
        assert self.life is not None
        return glance_at(self.life.store, self.life.targets, RUN).standing

    @property
    def trace(self) -> list[str]:
        return self.promises.trace


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108 - a file system in memory, not a name in it
