"""One host: its root, its engines, and the process of the service between them, which is killed and started."""

import asyncio
import random
import sqlite3
from collections import Counter
from collections.abc import Collection, Coroutine, Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeVar

from refitd.api.operations import change_run
from refitd.engine.port import EnginePort
from refitd.engine.registry import EngineSpec
from refitd.policy.strategy import Strategy
from refitd.problem import ProblemError
from refitd.settings import Settings
from refitd.state.decisions import is_decided
from refitd.state.journal.database import JOURNAL_NAME
from refitd.state.journal.journal import JournalError
from refitd.state.journal.recovery import open_journal
from refitd.state.records import EngineRecord
from refitd_client.contract.follow import HostReply
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.contract.states import EngineState
from refitd_client.contract.wire import RunChange
from refitd_hosts.follow.follower import UpstreamFollower
from refitd_hosts.hub.reported import ReportedHosts

from .disk import Pause, SimDisk, SimFolders
from .fault import Call, Fault
from .life import Life
from .promises import RUN, Promises
from .server import SimServer
from .sglang_server import SimSglang
from .virtual_time import VirtualClock, VirtualLoop
from .vllm_server import SimVllm

AnswerT = TypeVar("AnswerT")
PLUGGED = 0.7  # of the engines
ADDED = "c"  # the engine that the API adds and removes
PARTNER = "p"  # the server that decodes what engine a's own prefills, where that is a pair


def url_of(name: str) -> str:
    return f"http://{name}:1"


class Place:
    """A host. `state` is the folder of its journal."""

    name = "hub"
    follows = False  # whether an upstream orders what is served here

    def __init__(
        self, loop: VirtualLoop, chance: random.Random, *, state: Path, disk: SimDisk, strategy: Strategy
    ) -> None:
        self.loop = loop
        self.chance = chance
        self.clock = VirtualClock(loop)
        self.strategy = strategy
        self.state = state
        self.settings = Settings(root=state, keep_last=2, scan_interval=1.0, settle=0.1)
        self.own_root = state / "root"  # real, for what the service keeps of its own in a root
        (self.own_root / SERVICE_FOLDER).mkdir(parents=True, exist_ok=True)
        self.disk = disk
        self.journal_full = False
        self.wanted: set[str] = set()  # ids of versions that it has told followers to serve
        self.promises = self._promises()
        self.servers: dict[str, SimServer] = {}
        self.life: Life | None = None

    def _promises(self) -> Promises:
        return Promises(self)

    def _add_servers(self, names: Iterable[str], vllm: str) -> None:
        for name in names:
            self.servers[name] = (SimVllm if name in vllm else SimSglang)(
                name,
                self.disk,
                random.Random(self.chance.random()),
                self.promises.served,
                plugged=self.chance.random() < PLUGGED,
            )

    def folders(self, pause: Pause) -> SimFolders:
        return SimFolders(self.disk, pause, self.promises.before_discard, self.promises.before_recycling)

    def follow(self, life: Life) -> UpstreamFollower | None:
        del life

    def uploading(self) -> Collection[str]:
        """Ids of versions whose files are read to push them into a store."""
        return frozenset()

    @property
    def urls(self) -> list[str]:
        return [url_of(name) for name in self.servers if name not in {ADDED, PARTNER}]

    def connect(self, spec: EngineSpec, life: Life) -> EnginePort:
        """The product's adapter to an engine, for a process of the service."""
        server = self.servers[spec.url.removeprefix("http://").removesuffix(":1")]
        return server.connect(lambda: life.alive)

    def leading(self, life: Life) -> ReportedHosts | None:
        """The hosts that a process of the service leads, if it leads any."""
        del life

    def heard_report(self, name: str, reply: HostReply) -> bool:
        """A host has reported, and is replied to. Returns whether the reply says something new."""
        del name, reply
        return False

    def heard_reply(self, name: str, reply: HostReply, *, is_new: bool) -> None:
        pass

    def leads(self, engine: EngineRecord) -> bool:
        return engine.id.removesuffix(":1") not in self.servers

    def _call(self, request: Any) -> bool:
        """A request to the service: whether it was answered. It may be refused, and it may never be answered."""
        with suppress(ProblemError, JournalError, OSError, TimeoutError):
            self.loop.run_until_complete(asyncio.wait_for(request, 1.0))
            return True
        return False

    def ask(self, question: Coroutine[Any, Any, AnswerT]) -> AnswerT | None:
        with suppress(ProblemError, JournalError, TimeoutError):
            return self.loop.run_until_complete(asyncio.wait_for(question, 1.0))
        return None

    def sweep(self) -> None:
        if self.life is not None:
            self._call(self.life.collector.sweeper.run())

    def kill(self) -> None:
        if self.life is not None:
            self.loop.run_until_complete(self.life.kill())
            self.life = None

    def start(self) -> None:
        if self.life is None:
            self.life = Life(self)
            self.promises.restarted()

    def spoil_journal(self, table: str, index: int) -> None:
        """The service is killed, and a byte of one record of its journal is another one when it starts again."""
        self.heal_disk()
        self.start()
        assert self.life is not None
        if self.ask(self.life.decisions.written()) is None and self.life.journal.fault is not None:
            return
        before = {version.id: version for version in self.life.store.versions.values()}
        self.kill()
        with closing(sqlite3.connect(self.state / JOURNAL_NAME, isolation_level=None)) as connection:
            rows = connection.execute(f"SELECT rowid, record FROM {table} ORDER BY rowid").fetchall()  # noqa: S608
            if rows:
                number, record = rows[index % len(rows)]
                spoiled = bytes([*record[:5], record[5] ^ 1, *record[6:]])
                connection.execute(f"UPDATE {table} SET record = ? WHERE rowid = ?", (spoiled, number))  # noqa: S608
                if table != "events":
                    self.promises.forgotten(but=[id_ for id_, version in before.items() if is_decided(version)])
        open_journal(self.state, self.own_root).close()
        self.promises.judged_again()
        self.start()
        for version in self.life.store.versions.values() if self.life is not None else ():
            known = before[version.id]
            assert (version.barred, version.pinned) == (known.barred, known.pinned), f"15: {version.id} was decided on"

    def kill_engine(self, name: str) -> None:
        self.servers[name].die()

    def start_engine(self, name: str) -> None:
        self.servers[name].start()

    def fault(self, name: str, call: Call, fault: Fault) -> None:
        self.servers[name].faults[call] = fault

    def put_to_sleep(self, name: str, *, asleep: bool) -> None:
        """An operator wants an engine's memory for a while, or gives it back."""
        self.servers[name].sleeps(asleep=asleep)

    def misuse(self, name: str) -> None:
        self.servers[name].is_misused()

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
        self.disk.fault, self.disk.hidden, self.disk.empty, self.journal_full = None, False, False, False
        self.disk.unreadable.clear()
        self.disk.no_room = False

    def set_wall_clock(self, days: float) -> None:
        self.clock.wall_offset = days * 86400

    def pause_updates(self, *, paused: bool) -> None:
        if self.life is not None:
            self._call(change_run(RunChange(run=RUN, paused=paused), self.life.service))

    def mend(self) -> None:
        """The disk is well again, and so are the engines; the service runs."""
        self.heal_disk()
        for server in self.servers.values():
            server.faults.clear()
            server.lies = False
            server.sleeps(asleep=False)
        self.start()

    def start_what_is_dead(self) -> None:
        for server in self.servers.values():
            if not server.up:
                server.start()

    def server_of(self, engine: EngineRecord) -> SimServer:
        return self.servers[engine.id.removesuffix(":1")]

    @property
    def repairs(self) -> bool:
        """Whether an engine is being loaded again because a load has left its contents unknown."""
        engines = () if self.life is None else self.life.store.engines.values()
        return any(each.trouble.taints and each.state is not EngineState.QUARANTINED for each in engines)

    def wants_operator(self, engine: EngineRecord, tended: Collection[str]) -> bool:
        """Whether an alert asks the operator to do something for an engine, which was not done before."""
        asks = engine.state in {EngineState.QUARANTINED, EngineState.CONTESTED} or self.is_held(engine)
        return asks and f"{self.name} {engine.id} {engine.state}" not in tended

    def given_up_for_a_lie(self) -> list[EngineRecord]:
        """Engines that are given up since they contradict a lie that is on record, and no other engine is a witness:
        the lie was their own and no other is of their kind, or answers are compared, which are equal on no two engines.
        """
        engines = [] if self.life is None else list(self.life.store.engines.values())
        kinds = Counter(each.seen.configuration for each in engines)
        liars = {each.seen.configuration for each in engines if self.promises.has_lied(each)}
        gave_other = "are not those that a clean load of this version gave"
        given_up = [
            each
            for each in engines
            if each.state is EngineState.QUARANTINED and (each.reason or "").endswith(gave_other)
        ]
        return [
            each
            for each in given_up
            if each.seen.configuration in liars
            if kinds[each.seen.configuration] == 1 or f"its answers {gave_other}" in (each.reason or "")
        ]

    def is_held(self, engine: EngineRecord) -> bool:
        """Whether it is left alone as one that is asleep or that another has paused: it does not tell which.

        So is one that was to be resumed while it slept, when it was named no more.
        """
        if self.leads(engine):
            return False
        server = self.server_of(engine)
        left_alone = engine.known and engine.state in {EngineState.BEHIND, EngineState.UNREACHABLE}
        return left_alone and server.paused and isinstance(server, SimVllm)
