"""A vLLM server in memory, with the real one's defects (0.32.0, see docs/vllm.md and docs/adr/0015-vllm.md).

Without refitd's extension it takes its weights apart before it reads the first tensor. It answers 200 where tensors are
missing, are not numbers or have changed, and 500 after a load that failed: then the next request ends it or is answered
by what is there, and what was read goes into the next load. Of a tensor of another shape it may never recover. With
two ranks the answers after one failure are those of earlier calls. A label is set by a call of its own, and no path is
told.

The front answers how it was started and which routes there are; all else goes through the engine, one call at a time,
but for prompts, which wait while it is paused.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from refitd.engine.http import Reply
from refitd.engine.port import EnginePort
from refitd.engine.transaction import ServerEngine
from refitd.engine.vllm.contents import PROMPT
from refitd.engine.vllm.dialect import VllmDialect
from refitd_client.contract.plugin import Answer, UpdateOutcome
from support.scripted_vllm import DEAD, OF_NOTHING, POSTED, SHAPE, config

from .disk import Make, SimFolder
from .fault import Call, DiedError, Fault
from .plugin import STARTUP, SimPlugin, plugin_of
from .server import LOAD_TIMEOUT, MOUNT, TENSORS, SimServer, SimTransport, reply

APART = -1  # the content of a tensor that was taken apart and not read
LOOK_SECONDS = 0.5
FAR = 3.0  # a mixture's scores differ by so much from those of a version


class _Said(Enum):
    """What one rank answers to a call."""

    NOTHING = None
    TASKS = ("generate",)
    FAILED = "failed"


class Digests(Enum):
    """What the server's digests cover: nothing where the release has none, a part where layers are repacked.

    One release is newer than those in which it was read how they pause.
    """

    WHOLE = ("0.40.0", "cuda")
    PART = ("0.32.0", "cpu")
    NONE = ("0.30.0", "cuda")


@dataclass
class SimVllm(SimServer):
    """A vLLM of one rank. What its digests cover is left to chance."""

    tells_path = False
    calls: ClassVar = {
        "/weight_info": Call.PROBE,
        "/server_info": Call.STARTED,
        "/pause": Call.PAUSE,
        "/sleep": Call.PAUSE,
        "/resume": Call.RESUME,
        "/wake_up": Call.RESUME,
        "/weight_checker": Call.DIGESTS,
        "/reset_prefix_cache": Call.CACHES,
        "/update_weight_version": Call.LABEL,
        "/v1/completions": Call.TRIAL,
        "reload_weights": Call.LOAD,
        "refitd_update": Call.LOAD,
        "get_supported_tasks": Call.CONTROL,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self.chance.choice([1, 2])  # drawn for what numbers of found cases stand for
        self.digests = self.chance.choice(list(Digests))
        self._begin()

    def _begin(self) -> None:
        self.asleep = False
        self._ended = False  # the engine, behind a front that is there for a moment yet
        self._deadly = False  # whether the next forward ends the engine
        self._for_good = False  # whether no load will succeed any more
        self._left: dict[int, int] = {}  # tensors that the load before has read and that go into the next one
        self._nan = False
        self._held = 0  # calls to empty the caches that will not do it
        self._unread: list[deque[_Said]] = [deque() for _ in range(self.ranks)]

    def connect(self, alive: Callable[[], bool]) -> EnginePort:
        dialect = VllmDialect(SimTransport(self, alive))
        return ServerEngine(dialect, plugin_of(self, alive), LOAD_TIMEOUT)

    def call_of(self, path: str, body: dict[str, Any] | None) -> Call | None:
        """See `SimServer`. A GET of a route that is posted to only finds out whether it is there."""
        route = path.partition("?")[0]
        if body is None and route in POSTED:
            return None
        return self.calls.get((body or {}).get("method", route))

    @property
    def answers(self) -> bool:
        return super().answers and not self.asleep and not self._ended

    def start(self) -> None:
        super().start()
        self._begin()

    async def is_written_by_another(self, content: int) -> None:
        before = self.others
        await super().is_written_by_another(content)
        if self.others != before:
            self._deadly = self._nan = False
            self._left = {}

    def sleeps(self, *, asleep: bool) -> None:
        self.asleep = asleep and self.up

    def is_misused(self) -> None:
        self._heard([_Said.FAILED] * self.ranks)

    async def handle(self, path: str, body: dict[str, Any] | None, fault: Fault | None) -> Reply:
        await asyncio.sleep(self.chance.random() * 0.002)
        route = path.partition("?")[0]
        if fault is Fault.GARBAGE:
            return Reply(200, b"<html>welcome</html>")
        if (told := self._told_by_front(route, body)) is not None:
            return told
        if route == "/v1/completions":
            return await self._scored()
        async with self._scheduler:
            if fault is Fault.SLOW:
                await asyncio.sleep(45.0)
            if self._ended:
                return _error(DEAD)
            return await self._done(route, body or {}, fault)

    def _told_by_front(self, route: str, body: dict[str, Any] | None) -> Reply | None:
        release, device = self.digests.value
        if route == "/version":
            return reply(200, version=release)
        if route == "/server_info":
            told = config(tensor_parallel_size=self.ranks)
            told["vllm_config"]["model_config"] |= {"model": STARTUP, "enable_sleep_mode": True}
            told["vllm_config"] |= {"device_config": {"device": device}, "instance_id": str(self.boots)}
            return reply(200, **told)
        if route == "/weight_checker" and self.digests is Digests.NONE:
            return reply(404, detail="Not Found")
        return reply(405, detail="Method Not Allowed") if body is None and route in POSTED else None

    async def _done(self, route: str, body: dict[str, Any], fault: Fault | None) -> Reply:
        method = body.get("method", route)
        if method in {"reload_weights", "refitd_update"}:
            return await self._loaded(method, body["kwargs"], fault)
        if fault is Fault.DIES:
            raise DiedError
        if fault in {Fault.REFUSES, Fault.ROLLBACK, Fault.UNCLEAR, Fault.UNFLUSHED}:
            return _error("it does not like it")
        return self._told(method) or self._changed(method, body)

    def _told(self, method: str) -> Reply | None:
        is_held = self.paused or self.asleep
        match method:
            case "/weight_info":
                return reply(200, weight_version=self.label)
            case "/is_paused":
                return reply(200, is_paused=is_held)
            case "/is_sleeping":
                return reply(200, is_sleeping=is_held)
            case "/weight_checker":
                return reply(200, checksums=self._checksums())
            case "get_supported_tasks":
                return self._spoken([_Said.TASKS] * self.ranks)
            case _:
                return None

    def _changed(self, method: str, body: dict[str, Any]) -> Reply:
        match method:
            case "/pause" | "/sleep":
                self.paused = True
                return self._spoken([_Said.NOTHING] * self.ranks, status="paused" if method == "/pause" else "sleeping")
            case "/resume":
                return self._resumed("resumed")
            case "/wake_up":
                return reply(200, status="sleeping") if self.asleep else self._resumed("awake")
            case "/reset_prefix_cache":
                self._held = max(self._held - 1, 0)
                return reply(200, success=not self._held)
            case "/update_weight_version":
                self.label = body["new_version"]
                return reply(200, success=True, new_version=self.label)
            case _:
                raise AssertionError(f"nobody has told the simulation about {method}")

    def _resumed(self, status: str) -> Reply:
        self.paused = False
        if self._deadly or self.asleep:
            self._ended = True
            asyncio.get_running_loop().call_later(self.chance.random() * 0.5, self._exit, self.boots)
        else:
            self.served(self)
        return reply(200, status=status)

    def _exit(self, boots: int) -> None:
        if self.boots == boots:
            self.die()

    def _checksums(self) -> dict[str, str]:
        covered = TENSORS if self.digests is Digests.WHOLE else 1
        return {f"t{i}": self.checksum(each) if i < covered else OF_NOTHING for i, each in enumerate(self.tensors)}

    async def _scored(self) -> Reply:
        """A prompt. Scores tell a mixture from a version, and not one version from the next."""
        while self.paused and not self._ended:  # noqa: ASYNC110 - in virtual time
            await asyncio.sleep(LOOK_SECONDS)
        if self._ended:
            return _error(DEAD)
        score = -2.0 - self.chance.random() * 0.2 - (FAR if len(set(self.tensors)) > 1 else 0.0)
        scores = [None, *[math.nan if self._nan else score] * (len(PROMPT) - 1), *[-0.5] * 8]
        return reply(200, choices=[{"logprobs": {"token_logprobs": scores}}])

    # Loads.

    async def _loaded(self, method: str, arguments: dict[str, Any], fault: Fault | None) -> Reply:
        if fault is Fault.REFUSES and method == "reload_weights":
            return reply(401, error="a proxy before it wants a key")
        self.orders += 1
        path: str = arguments.get("weights_path") or arguments["path"]
        try:
            self.loading = name = path.removeprefix(f"{MOUNT}/")
            if self.asleep:
                raise DiedError  # there is no memory to write to
            if method == "refitd_update":
                assert self.plugin is not None
                answer = await self._updated(self.plugin, name, fault)
                if answer.outcome is not UpdateOutcome.SERVED:
                    return self._said_by_extension(answer)
                is_whole, said = True, self._said_by_extension(answer)
            else:
                failed = await self._reloaded(name, fault)
                is_whole = not any(failed)
                said = self._spoken([_Said.FAILED if each else _Said.NOTHING for each in failed])
        finally:
            self.loading = self.reading = None
        self.path, self.loaded_in = path, self.life
        if is_whole:
            self.foreign = False
            self.served(self)
        if fault is Fault.UNFLUSHED:
            self._held = self.chance.choice([3, 10**6])
        return said

    async def _updated(self, plugin: SimPlugin, path: str, fault: Fault | None) -> Answer:
        answer = await plugin.load(path, fault)
        if answer.outcome is UpdateOutcome.SERVED:
            self._left, self._deadly, self._nan = {}, False, False
        return answer

    def _said_by_extension(self, answer: Answer) -> Reply:
        return reply(200, results=[{"ok": True, "message": answer.message}] * self.ranks)

    async def _reloaded(self, path: str, fault: Fault | None) -> list[bool]:
        if self.plugin is not None:
            self.plugin.lost_track()
        folder = None if self.disk.hidden else self.disk.any(path)
        before, self.tensors = self.tensors, (APART,) * TENSORS
        self.reading = folder
        first = APART if folder is None else folder.content
        await asyncio.sleep(self.chance.random() * 0.2)
        if fault is Fault.DIES:
            raise DiedError
        await asyncio.sleep(self.chance.random() * 0.2)
        now = APART if folder is None else folder.content
        missing = before[-1] if folder is not None and folder.make is Make.MISSING else now
        read = (first, first, now, missing)
        left, self._left = self._left, {}
        failed = [self._fails(rank, folder, fault, left) for rank in range(self.ranks)]
        if fault is Fault.UNCLEAR:
            failed[self.chance.randrange(self.ranks)] = True
        self.tensors = tuple(self._of_tensor(i, read, left, failed) for i in range(TENSORS))
        self._nan = folder is not None and folder.make is Make.NAN
        self._deadly = any(failed) and self.chance.random() < 0.7
        return failed

    def _fails(self, rank: int, folder: SimFolder | None, fault: Fault | None, left: dict[int, int]) -> bool:
        """Whether a rank fails of what it reads, or of what the load before has left there."""
        if folder is not None and folder.make is Make.SHAPE:
            self._for_good = self._for_good or self.chance.random() < 0.3
        is_bad = folder is None or folder.make in {Make.HALF, Make.DELTA, Make.SHAPE}
        full = any(self._rank_of(i) == rank for i in left)
        is_full = full and self.digests is Digests.PART and self.chance.random() < 0.5
        return is_bad or self._for_good or fault is Fault.ROLLBACK or is_full

    def _of_tensor(self, i: int, read: tuple[int, ...], left: dict[int, int], failed: list[bool]) -> int:
        """What a tensor holds after a load. What a load that fails has read is in the next one."""
        if not failed[self._rank_of(i)]:
            return left.get(i, read[i])
        if read[i] != APART and self.chance.random() < 0.3:
            self._left[i] = read[i]
        return APART

    def _rank_of(self, i: int) -> int:
        return i * self.ranks // TENSORS

    # Answers of ranks.

    def _heard(self, said: list[_Said]) -> list[_Said] | None:
        """The answers to a call as they are read, one of each rank; None at the first failure. The others wait."""
        for unread, each in zip(self._unread, said, strict=True):
            unread.append(each)
        heard: list[_Said] = []
        for unread in self._unread:
            if (each := unread.popleft()) is _Said.FAILED:
                return None
            heard.append(each)
        return heard

    def _spoken(self, said: list[_Said], **told: Any) -> Reply:
        heard = self._heard(said)
        if heard is None:
            return _error(SHAPE)
        return reply(200, **(told or {"results": [each.value and list(each.value) for each in heard]}))


def _error(message: str) -> Reply:
    return reply(500, error={"message": message, "type": "InternalServerError", "param": None, "code": 500})
