"""The whole service in virtual time, between a made-up disk and made-up engines; what may happen to it; what must hold.

The parts are the product's: catalog, intake, rollout, adapter, sweep, ledger and journal (real SQLite, in a folder in
memory). Made up are time, the disk and the servers. A kill stops the service dead: nothing of it acts any more, not
even what it would do on its way out; what the journal had committed is what the next one finds.
"""

import asyncio
import itertools
import random
import tempfile
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from refitd.journal.journal import JournalError
from refitd.problem import ProblemError
from refitd.rollout.strategy import Strategy, StrategyName
from refitd.settings import Settings
from refitd.surface.versions import pin, rollback, unpin
from refitd_client.contract.wire import NewEngine, Rollback

from .disk import Make, SimDisk
from .fault import Fault
from .life import ADDED, Life, url_of
from .promises import Promises
from .server import SimServer
from .trainer import RUN, SimTrainer
from .virtual_time import VirtualClock, VirtualLoop

AnswerT = TypeVar("AnswerT")
HEAL_SECONDS = 120.0
PLUGGED = 0.7  # of the engines
LOOK_SECONDS = 0.2  # between two looks at what should hold at any time; servers are looked at whenever they change


class World:
    """A simulation. Two engines are named by settings, a third comes and goes; each has refitd's plugin or not.
    Everything that is left to chance follows from `seed`.
    """

    def __init__(self, seed: int, *, strategy: StrategyName = StrategyName.ALL) -> None:
        self.chance = random.Random(seed)
        self.loop = VirtualLoop(random.Random(self.chance.random()))
        asyncio.set_event_loop(self.loop)
        self.clock = VirtualClock(self.loop)
        self.strategy = Strategy(name=strategy)
        self._folder = tempfile.TemporaryDirectory(prefix="refitd-sim-", dir=_memory())
        self.state = Path(self._folder.name)
        self.settings = Settings(
            root=self.state, keep_last=2, scan_interval=1.0, settle=0.5, settle_timeout=5.0, reclaim_interval=5.0
        )
        self.disk = SimDisk()
        self.journal_full = False
        self.promises = Promises(self)
        self.servers = {
            name: SimServer(
                name,
                self.disk,
                random.Random(self.chance.random()),
                self.promises.served,
                plugged=self.chance.random() < PLUGGED,
            )
            for name in ("a", "b", ADDED)
        }
        self._contents = itertools.count(1)
        self.trainer = SimTrainer(self, self._contents)
        self.life: Life | None = Life(self)
        self.log: list[str] = []

    def close(self) -> None:
        """End everything."""
        self.kill()
        for server in self.servers.values():
            server.die()
        self.loop.run_until_complete(asyncio.sleep(1.0))
        asyncio.set_event_loop(None)
        self.loop.close()
        self._folder.cleanup()

    # What may happen. Each is one step.

    def wait(self, seconds: float) -> None:
        """Let time pass, and look at the promises."""
        self.loop.run_until_complete(self._wait(seconds))
        self.promises.hold()

    async def _wait(self, seconds: float) -> None:
        end = self.loop.time() + seconds
        while self.loop.time() < end:
            await asyncio.sleep(min(LOOK_SECONDS, max(end - self.loop.time(), 1e-3)))
            self.promises.hold_now()
            if self.life is not None:
                self.life.check()

    def roll_back(self) -> None:
        """An operator has seen enough of the newest version."""
        if self.life is not None:
            self.call(rollback(Rollback(run=RUN), self.life.service))

    def pin(self, index: int, *, pinned: bool) -> None:
        """Keep a version, or let it go."""
        if self.life is not None and (versions := sorted(self.life.ledger.versions)):
            change = pin if pinned else unpin
            self.call(change(versions[index % len(versions)], self.life.service))

    def sweep(self) -> None:
        """Somebody asks for a reclaim."""
        if self.life is not None:
            self.call(self.life.collector.sweeper.run())

    def resync(self, name: str) -> None:
        """An operator asks for a load, and may be told that it would go backwards."""
        if self.life is not None and f"{name}:1" in self.life.ledger.engines:
            with suppress(ProblemError):
                self.life.fleet.resync(f"{name}:1")

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

    def call(self, request: Any) -> bool:
        """A request to the service: whether it was answered. It may be refused, and it may never be answered."""
        with suppress(ProblemError, JournalError, OSError, TimeoutError):
            self.loop.run_until_complete(asyncio.wait_for(request, 1.0))
            return True
        return False

    def ask(self, question: Coroutine[Any, Any, AnswerT]) -> AnswerT | None:
        """A question to the service, None where it is not answered."""
        with suppress(ProblemError, JournalError, TimeoutError):
            return self.loop.run_until_complete(asyncio.wait_for(question, 1.0))
        return None

    def kill(self) -> None:
        """SIGKILL to the service."""
        if self.life is not None:
            self.loop.run_until_complete(self.life.kill())
            self.life = None

    def start(self) -> None:
        """A new process of the service."""
        if self.life is None:
            self.life = Life(self)
            self.promises.restarted()

    def kill_engine(self, name: str) -> None:
        """SIGKILL to an engine."""
        self.servers[name].die()

    def start_engine(self, name: str) -> None:
        """It comes (back) on its start-up weights."""
        self.servers[name].start()

    def fault(self, name: str, path: str, fault: Fault) -> None:
        """The next call of a kind goes wrong."""
        self.servers[name].faults[path] = fault

    def relabel(self, name: str) -> None:
        """Somebody else sets the version label."""
        self.servers[name].label = "somebody else's"

    def take_away(self, index: int) -> None:
        """The trainer deletes a version of its own."""
        if paths := sorted(self.disk.folders):
            self.disk.remove(paths[index % len(paths)])

    def empty_root(self, *, asked: bool) -> None:
        """Everything in the root is gone, and the trainer begins again; the journal is kept."""
        self.trainer.take_back(announce=True)
        self.disk.clear()
        self.trainer.begin_again(asked=asked)

    def rewrite(self, index: int, make: Make) -> None:
        """Other bytes at the same path, whoever reads it."""
        paths = sorted(self.disk.folders)
        if paths:
            path = paths[index % len(paths)]
            self.disk.rewrite(path, make, next(self._contents))
            self.promises.rewritten(path)

    def disk_fault(self, kind: str) -> None:
        """The root cannot be read, is unmounted or looks empty, its folders cannot be, or the journal has no room."""
        match kind:
            case "error":
                self.disk.fault = OSError(5, "Input/output error")
            case "unmounted":
                self.disk.hidden = True
            case "empty":
                self.disk.empty = True
            case "no room":
                self.disk.no_room = True
            case "unreadable":
                self.disk.unreadable = set(self.disk.folders)
            case _:
                self.journal_full = True

    def heal_disk(self) -> None:
        """The disk is well again."""
        self.disk.fault, self.disk.hidden, self.disk.empty, self.journal_full = None, False, False, False
        self.disk.unreadable.clear()
        self.disk.no_room = False

    def set_wall_clock(self, days: float) -> None:
        """An administrator sets the clock."""
        self.clock.wall_offset = days * 86400

    def heal(self) -> None:
        """Everything works again, and time passes: then everything must be as it should."""
        self.trainer.take_back(announce=True)
        self.heal_disk()
        for server in self.servers.values():
            server.faults.clear()
        self.start()
        for _ in range(2):  # a fault that was under way may still kill one
            for server in self.servers.values():
                if not server.up:
                    server.start()
            self.wait(HEAL_SECONDS)
        assert self.life is not None
        for record in list(self.life.ledger.engines.values()):
            if record.state.value == "QUARANTINED":
                self.servers[record.id.removesuffix(":1")].start()  # as an operator would, told by the alert
        self.wait(HEAL_SECONDS)
        self.promises.hold_in_the_end()

    @property
    def trace(self) -> list[str]:
        """What has happened, to compare two runs of one seed."""
        return self.promises.trace


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108 - a file system in memory, not a name in it
