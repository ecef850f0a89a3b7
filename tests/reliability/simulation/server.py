"""A server in memory behind the product's own adapter: its process, its weights, and the calls that go wrong.

What each kind of server does with a call is in `sglang_server` and `vllm_server`.
"""

import asyncio
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from refitd.engine.http import CallFailure, Key, NoReply, Reply, Transport
from refitd.engine.port import EnginePort

from .disk import SimDisk, SimFolder
from .fault import Call, DiedError, Fault
from .plugin import BASE, STARTUP, SimPlugin

TENSORS = 4
MOUNT = "/mount"
LOAD_TIMEOUT = 30.0


@dataclass
class SimServer(ABC):
    """One engine. `tensors` are what it computes with; it computes when `answers` says so. `plugged`: with a plugin.

    Attributes:
        calls: what a call to a path is, of those that may go wrong.
        tells_path: whether a probe learns the path of what it serves, whoever has set its label.
        ranks: processes that hold its weights.
        role: "prefill" or "decode" of a server that does one of them for others.
        partner: the server that is updated together with it, as one engine.
        lies: whether the checksums that it gives itself are wrong. Its plugin goes by the version's files.
    """

    calls: ClassVar[dict[str, Call]]
    tells_path: ClassVar[bool] = True

    name: str
    disk: SimDisk
    chance: random.Random
    served: Callable[["SimServer"], None]
    plugged: bool = False
    up: bool = True
    paused: bool = False
    loading: str | None = None
    reading: SimFolder | None = None
    tensors: tuple[int, ...] = (BASE,) * TENSORS
    path: str = STARTUP
    label: str = "default"
    boots: int = 1
    loaded_in: int = 0  # the life that the last load of the service's came through in
    others: int = 0  # loads by another writer
    foreign: bool = False  # whether it serves what another writer has loaded
    orders: int = 0  # loads that it was told to carry out
    ranks: int = 1
    role: str | None = None
    partner: "SimServer | None" = None
    lies: bool = False
    faults: dict[Call, Fault] = field(default_factory=dict[Call, Fault])
    tasks: dict["asyncio.Task[Reply]", None] = field(default_factory=dict["asyncio.Task[Reply]", None])

    def __post_init__(self) -> None:
        self._scheduler = asyncio.Lock()
        self.plugin = SimPlugin(self) if self.plugged else None

    @property
    def proves(self) -> bool:
        return self.plugged

    def checksum(self, content: int) -> str:
        return f"{content:x}{'?' if self.lies else ''}"

    @property
    def life(self) -> int:
        """What was proved holds for as long as this is the same: until a restart, or a load by another writer."""
        return self.boots + self.others

    async def is_written_by_another(self, content: int) -> None:
        scheduler = self._scheduler
        async with scheduler:
            if not self.up or scheduler is not self._scheduler:
                return
            if self.plugin is not None:
                self.plugin.lost_track()
            self.others += 1
            self.tensors, self.foreign = (content,) * TENSORS, True
            self.path, self.label = f"/other/v{content:06d}", str(content)
            self.served(self)

    @property
    def is_as_loaded(self) -> bool:
        """Whether it holds what the service has loaded last: it was not restarted since, nor written by another."""
        return self.up and self.loaded_in == self.life

    @property
    def answers(self) -> bool:
        return self.up and not self.paused and self.loading is None

    def die(self) -> None:
        self.up, self.loading, self.reading = False, None, None
        for task in list(self.tasks):
            task.cancel()

    def start(self) -> None:
        self.die()
        self.up, self.paused, self.tensors = True, False, (BASE,) * TENSORS
        self.path, self.label, self.boots, self.foreign = STARTUP, "default", self.boots + 1, False
        if self.plugin is not None:
            self.plugin.restart()
        self._scheduler = asyncio.Lock()

    @abstractmethod
    async def handle(self, path: str, body: dict[str, Any] | None, fault: Fault | None) -> Reply:
        pass

    @abstractmethod
    def connect(self, alive: Callable[[], bool]) -> EnginePort:
        """The product's adapter to it. `alive` says whether the service's process is there, which calls."""

    def call_of(self, path: str, body: dict[str, Any] | None) -> Call | None:
        return self.calls.get(path)

    @abstractmethod
    def sleeps(self, *, asleep: bool) -> None:
        """An operator has it give up its memory for a while, where it can; then it has its weights there again."""

    def is_resumed(self) -> None:
        self.paused = False
        self.served(self)

    @abstractmethod
    def is_misused(self) -> None:
        """A call of somebody else fails in it, which changes nothing of its weights."""


def reply(status: int, /, **data: Any) -> Reply:
    return Reply(status, json.dumps(data).encode())


class SimTransport(Transport):
    """The adapter's way to a server. A call that nobody waits for any more goes on in the server."""

    def __init__(self, server: SimServer, alive: Callable[[], bool]) -> None:
        super().__init__(f"http://{server.name}:1", api_key=None, admin_key=None)
        self._sim = server
        self._alive = alive

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None, key: Key, within: float, most: int = 0
    ) -> Reply | NoReply:
        if not self._alive():  # the service was killed: it says nothing any more
            raise asyncio.CancelledError
        server = self._sim
        if not server.up:
            return NoReply(CallFailure.NEVER_SENT, "connection refused")
        call = server.call_of(path, body)
        fault = None if call is None else server.faults.pop(call, None)
        if fault is Fault.CUT_BEFORE:
            return NoReply(CallFailure.NO_ANSWER, "connection reset")
        task = asyncio.get_running_loop().create_task(server.handle(path, body, fault))
        server.tasks[task] = None
        task.add_done_callback(lambda done: server.tasks.pop(done, None))
        task.add_done_callback(lambda done: server.die() if _died(done) else None)
        done, _ = await asyncio.wait({task}, timeout=within)
        if not self._alive():
            raise asyncio.CancelledError
        if not done:
            return NoReply(CallFailure.TIMED_OUT, f"no answer within {within:g} s")
        if task.cancelled() or _died(task) or fault is Fault.CUT_AFTER:
            return NoReply(CallFailure.NO_ANSWER, "connection reset")
        return task.result()  # whatever else is raised is a fault of the simulation


def _died(task: "asyncio.Task[Reply]") -> bool:
    return not task.cancelled() and isinstance(task.exception(), DiedError)
