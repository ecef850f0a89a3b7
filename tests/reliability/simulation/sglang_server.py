"""An SGLang server in memory, with the real one's defects.

Defects (0.5.23, see `refitd_embedded.weights`): it accepts missing tensors and NaN, "rolls back" onto the file that has
just failed, dies of a torn one, keeps an old path and label after a refused flush, and goes on loading when its client
has hung up. One call at a time goes through the scheduler; the HTTP front answers beside it.
"""

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

from refitd.engine.http import Reply
from refitd.engine.port import EnginePort
from refitd.engine.sglang.dialect import SglangDialect
from refitd.engine.sglang.pair import PairMember, SglangPair
from refitd.engine.transaction import ServerEngine
from refitd_client.contract.plugin import UpdateOutcome

from .disk import Make
from .fault import Call, DiedError, Fault
from .plugin import STARTUP, SimPlugin, plugin_of, spoken
from .server import LOAD_TIMEOUT, MOUNT, TENSORS, SimServer, SimTransport, reply

_NOT_FLUSHED = "Succeeded to update model weights, but cache was not flushed"


class SimSglang(SimServer):
    """An SGLang."""

    calls: ClassVar = {
        "/update_weights_from_disk": Call.LOAD,
        "/pause_generation": Call.PAUSE,
        "/continue_generation": Call.RESUME,
        "/weights_checker": Call.DIGESTS,
        "/model_info": Call.PROBE,
        "/server_info": Call.STARTED,
        "/flush_cache": Call.CACHES,
        "/generate": Call.TRIAL,
    }

    def connect(self, alive: Callable[[], bool]) -> EnginePort:
        if self.partner is None:
            return ServerEngine(SglangDialect(SimTransport(self, alive)), plugin_of(self, alive), LOAD_TIMEOUT)
        both = [(SglangDialect(SimTransport(each, alive), in_pair=True), each) for each in (self, self.partner)]
        return SglangPair([PairMember(dialect, plugin_of(each, alive), LOAD_TIMEOUT) for dialect, each in both])

    def sleeps(self, *, asleep: bool) -> None:
        pass

    def is_misused(self) -> None:
        pass

    async def handle(self, path: str, body: dict[str, Any] | None, fault: Fault | None) -> Reply:
        await asyncio.sleep(self.chance.random() * 0.002)
        if fault is Fault.GARBAGE:
            return Reply(200, b"<html>welcome</html>")
        if path == "/model_info":
            return reply(200, model_path=self.path, weight_version=self.label)
        async with self._scheduler:
            return await self._scheduled(path, body or {}, fault)

    async def _scheduled(self, path: str, body: dict[str, Any], fault: Fault | None) -> Reply:
        if fault is Fault.SLOW:
            await asyncio.sleep(45.0)
        match path:
            case "/server_info":
                return reply(
                    200, version="0.5.23", model_path=STARTUP, disaggregation_mode=self.role, **self._told_of_process()
                )
            case "/pause_generation":
                self.paused = True
                return reply(200, message="paused")
            case "/continue_generation":
                self.paused = False
                self.served(self)
                return reply(200, message="continued")
            case "/weights_checker":
                sums = {f"t{i}": self.checksum(value) for i, value in enumerate(self.tensors)}
                return reply(200, ranks=[{"checksums": sums}])
            case "/flush_cache":
                return reply(200)
            case "/generate":
                return reply(200, meta_info={"output_token_logprobs": [[-0.5, 1, None]], "weight_version": self.label})
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
            self.loading = path = body["model_path"].removeprefix(f"{MOUNT}/")
            if self.plugin is not None and self.plugin.minds(path):
                return await self._load_by(self.plugin, path, body, fault)
            if self.plugin is not None:
                self.plugin.lost_track()
            if fault is Fault.REFUSES:
                return reply(400, success=False, message="Failed to get weights iterator: it does not like it.")
            folder = self.disk.any(path)
            if folder is None or self.disk.hidden or folder.make in {Make.HALF, Make.DELTA}:
                return reply(400, success=False, message="Failed to get weights iterator: nothing there.")
            self.reading, make = folder, folder.make
            content = folder.content
            await asyncio.sleep(self.chance.random() * 0.2)
            self.tensors = (content, content, *self.tensors[2:])  # here it is a mixture
            if fault is Fault.DIES or make in {Make.SHAPE, Make.FLIPPED}:
                raise DiedError
            await asyncio.sleep(self.chance.random() * 0.2)
            if fault is Fault.UNCLEAR:
                return reply(400, success=False, message="Something has failed.")
            if fault is Fault.ROLLBACK:
                return reply(400, success=False, message="Failed to update weights. Rolling back to original weights.")
            whole = TENSORS - (make is Make.MISSING)
            now = folder.content  # of the files that it has open, whatever their name is by now
            self.tensors = (content, content, now, now)[:whole] + self.tensors[whole:]
            if fault is Fault.UNFLUSHED:
                return reply(400, success=False, message=_NOT_FLUSHED)
            self._serves(body)
        finally:
            self.loading = self.reading = None
        self.served(self)
        return reply(200, success=True, message="Succeeded to update model weights.")

    def _serves(self, body: dict[str, Any]) -> None:
        """A load came through: from now on it calls itself what it was told to."""
        self.path, self.label, self.loaded_in = body["model_path"], body["weight_version"], self.life
        self.foreign = False

    async def _load_by(self, plugin: SimPlugin, path: str, body: dict[str, Any], fault: Fault | None) -> Reply:
        answer = await plugin.load(path, fault)
        if answer.outcome is UpdateOutcome.SERVED:
            if fault is Fault.UNFLUSHED:
                return reply(400, success=False, message=_NOT_FLUSHED)
            self._serves(body)
            self.loading = self.reading = None
            self.served(self)
        status, said = spoken(answer, path, body["weight_version"])
        return reply(status, **said)
