"""An SGLang server in memory, with the real one's defects, behind the product's own adapter.

Defects (0.5.23, see `refitd_embedded.defects`): it accepts missing tensors and NaN, "rolls back" onto the file that has
just failed, dies of a torn one, keeps an old path and label after a refused flush, and goes on loading when its client
has hung up. One call at a time goes through the scheduler; the HTTP front answers beside it.
"""

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from refitd.engine.http import CallFailure, NoReply, Reply
from refitd_client.contract.plugin import UpdateOutcome

from .disk import Make, SimDisk, SimFolder
from .fault import DiedError, Fault
from .plugin import BASE, STARTUP, SimPlugin, spoken

TENSORS = 4
MOUNT = "/mount"
_NOT_FLUSHED = "Succeeded to update model weights, but cache was not flushed"


@dataclass
class SimServer:
    """One engine. `tensors` are what it computes with; it computes when `answers` says so. `plugged`: with a plugin."""

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
    faults: dict[str, Fault] = field(default_factory=dict[str, Fault])
    tasks: dict["asyncio.Task[Reply]", None] = field(default_factory=dict["asyncio.Task[Reply]", None])

    def __post_init__(self) -> None:
        self._scheduler = asyncio.Lock()
        self.plugin = SimPlugin(self) if self.plugged else None

    @property
    def life(self) -> int:
        """What was proved holds for as long as this is the same: until a restart, or a load by another writer."""
        return self.boots + self.others

    async def is_written_by_another(self, content: int) -> None:
        """Another writer loads its weights, when it is its turn."""
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
    def answers(self) -> bool:
        """Whether tokens are computed now."""
        return self.up and not self.paused and self.loading is None

    def die(self) -> None:
        """The process is gone, and whatever it did."""
        self.up, self.loading, self.reading = False, None, None
        for task in list(self.tasks):
            task.cancel()

    def start(self) -> None:
        """A new process on its start-up weights."""
        self.die()
        self.up, self.paused, self.tensors = True, False, (BASE,) * TENSORS
        self.path, self.label, self.boots, self.foreign = STARTUP, "default", self.boots + 1, False
        if self.plugin is not None:
            self.plugin.restart()
        self._scheduler = asyncio.Lock()

    async def handle(self, path: str, body: dict[str, Any] | None, fault: Fault | None) -> Reply:
        """Answer a call."""
        await asyncio.sleep(self.chance.random() * 0.002)
        if fault is Fault.GARBAGE:
            return Reply(200, "<html>welcome</html>", None)
        if path == "/model_info":
            return _reply(200, model_path=self.path, weight_version=self.label)
        async with self._scheduler:
            return await self._scheduled(path, body or {}, fault)

    async def _scheduled(self, path: str, body: dict[str, Any], fault: Fault | None) -> Reply:
        if fault is Fault.SLOW:
            await asyncio.sleep(45.0)
        match path:
            case "/server_info":
                return _reply(200, version="0.5.23", model_path=STARTUP, **self._told_of_process())
            case "/pause_generation":
                self.paused = True
                return _reply(200, message="paused")
            case "/continue_generation":
                self.paused = False
                self.served(self)
                return _reply(200, message="continued")
            case "/weights_checker":
                sums = {f"t{i}": f"{value:x}" for i, value in enumerate(self.tensors)}
                return _reply(200, ranks=[{"checksums": sums}])
            case "/flush_cache":
                return _reply(200)
            case "/generate":
                return _reply(200, meta_info={"output_token_logprobs": [[-0.5, 1, None]], "weight_version": self.label})
            case "/update_weights_from_disk":
                return await self._load(body, fault)
            case _:
                raise AssertionError(f"nobody has told the simulation about {path}")

    def _told_of_process(self) -> dict[str, Any]:
        """A current SGLang tells how its start went, an older one its seed alone, and one tells nothing."""
        told: dict[str, Any] = {"random_seed": self.boots, "startup_time": {"scheduler_e2e": self.boots / 7}}
        return {"a": told, "b": {"random_seed": self.boots}}.get(self.name, {})

    async def _load(self, body: dict[str, Any], fault: Fault | None) -> Reply:
        self.orders += 1
        try:
            self.loading = body["model_path"].removeprefix(f"{MOUNT}/")
            if self.plugin is not None and self.plugin.minds(self.loading):
                return await self._load_by(self.plugin, self.loading, body, fault)
            if self.plugin is not None:
                self.plugin.lost_track()
            if fault is Fault.REFUSES:
                return _reply(400, success=False, message="Failed to get weights iterator: it does not like it.")
            folder = self.disk.any(self.loading)
            if folder is None or self.disk.hidden or folder.make in {Make.HALF, Make.DELTA}:
                return _reply(400, success=False, message="Failed to get weights iterator: nothing there.")
            self.reading, make = folder, folder.make
            content = folder.content
            await asyncio.sleep(self.chance.random() * 0.2)
            self.tensors = (content, content, *self.tensors[2:])  # here it is a mixture
            if fault is Fault.DIES or make in {Make.SHAPE, Make.FLIPPED}:
                raise DiedError
            await asyncio.sleep(self.chance.random() * 0.2)
            if fault is Fault.UNCLEAR:
                return _reply(400, success=False, message="Something has failed.")
            if fault is Fault.ROLLBACK:
                return _reply(400, success=False, message="Failed to update weights. Rolling back to original weights.")
            whole = TENSORS - (make is Make.MISSING)
            now = folder.content  # of the files that it has open, whatever their name is by now
            self.tensors = (content, content, now, now)[:whole] + self.tensors[whole:]
            if fault is Fault.UNFLUSHED:
                return _reply(400, success=False, message=_NOT_FLUSHED)
            self._serves(body)
        finally:
            self.loading = self.reading = None
        self.served(self)
        return _reply(200, success=True, message="Succeeded to update model weights.")

    def _serves(self, body: dict[str, Any]) -> None:
        """A load came through: from now on it calls itself what it was told to."""
        self.path, self.label, self.loaded_in = body["model_path"], body["weight_version"], self.life
        self.foreign = False

    async def _load_by(self, plugin: SimPlugin, path: str, body: dict[str, Any], fault: Fault | None) -> Reply:
        answer = await plugin.load(path, fault)
        if answer.outcome is UpdateOutcome.SERVED:
            if fault is Fault.UNFLUSHED:
                return _reply(400, success=False, message=_NOT_FLUSHED)
            self._serves(body)
            self.loading = self.reading = None
            self.served(self)
        status, said = spoken(answer, path, body["weight_version"])
        return _reply(status, **said)


def _reply(status: int, **data: Any) -> Reply:
    return Reply(status, json.dumps(data), data)


class SimTransport:
    """The adapter's way to a server. A call that nobody waits for any more goes on in the server."""

    url = "http://simulated"

    def __init__(self, server: SimServer, alive: Callable[[], bool]) -> None:
        self._server = server
        self._alive = alive

    async def get(self, path: str, within: float) -> Reply | NoReply:
        return await self._call(path, None, within)

    async def post(self, path: str, body: dict[str, Any], within: float) -> Reply | NoReply:
        return await self._call(path, body, within)

    async def ask(self, path: str, body: dict[str, Any], within: float) -> Reply | NoReply:
        return await self._call(path, body, within)

    async def aclose(self) -> None:
        pass

    async def _call(self, path: str, body: dict[str, Any] | None, within: float) -> Reply | NoReply:
        if not self._alive():  # the service was killed: it says nothing any more
            raise asyncio.CancelledError
        server = self._server
        if not server.up:
            return NoReply(CallFailure.NEVER_SENT, "connection refused")
        fault = server.faults.pop(path, None)
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
        if task.cancelled() or task.exception() is not None or fault is Fault.CUT_AFTER:
            return NoReply(CallFailure.NO_ANSWER, "connection reset")
        return task.result()


def _died(task: "asyncio.Task[Reply]") -> bool:
    return not task.cancelled() and isinstance(task.exception(), DiedError)
