"""The service's side of the channel to a made-up engine's plugin, without sockets."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from refitd.engine.plugin.beside import Beside
from refitd.engine.plugin.crew import Launch
from refitd.engine.plugin.prepared import Preparation, Ready, Refused, Unprepared
from refitd.engine.port import Files, Offered

from .fault import Fault
from .plugin import RefusedError

if TYPE_CHECKING:
    from .server import SimServer

RELEASE = "0.1.0"


class SimBeside(Beside):
    """The channel to an engine's plugin, without sockets."""

    def __init__(self, server: "SimServer", alive: Callable[[], bool]) -> None:
        """`alive` says whether the service's process is there, which speaks."""
        super().__init__(None, allow_dtype_cast=False)
        self._server, self._alive = server, alive
        self._is_there = False
        self._boot = 0

    @property
    def release(self) -> str | None:
        return RELEASE if self._is_there else None

    @property
    def takes_offers(self) -> bool:
        return self._is_there

    @property
    def reason(self) -> str | None:
        return None if self._is_there else "no plugin speaks for it"

    async def look(self, launch: Launch) -> None:
        self._is_there, self._boot = self._server.up, self._server.boots

    async def prepare(self, files: Files, within: float) -> Preparation:
        plugin, fault = self._server.plugin, self._server.faults.pop("prepare", None)
        if not await self._reached(fault, within) or plugin is None:
            return Unprepared("a rank does not answer")
        try:
            plugin.prepare(files)
        except RefusedError as refused:
            return Refused(str(refused), needs_full=refused.needs == "full")
        if fault is Fault.CUT_AFTER:
            plugin.forget()
            return Unprepared("a rank does not answer")
        self._waiting = True
        return Ready()

    async def take(self, offered: Offered, within: float) -> Preparation:
        plugin, fault = self._server.plugin, self._server.faults.pop("prepare", None)
        if not await self._reached(fault, within) or plugin is None or fault is Fault.CUT_AFTER:
            return Refused("a rank does not answer")
        try:
            plugin.take(offered)
        except RefusedError as refused:
            return Refused(str(refused))
        self._waiting = True
        return Ready()

    async def forget(self) -> None:
        if self._waiting and self._server.plugin is not None and self._alive():
            self._waiting = False
            self._server.plugin.forget()

    async def contents(self) -> list[str]:
        await asyncio.sleep(self._server.chance.random() * 0.01)
        plugin = self._server.plugin
        return [plugin.contents] if plugin is not None and await self._reached(None, 0.0) else [""]

    async def _reached(self, fault: Fault | None, within: float) -> bool:
        """Whether the very process answers that was greeted."""
        await asyncio.sleep(within if fault is Fault.SLOW else self._server.chance.random() * 0.02)
        if not self._alive():
            raise asyncio.CancelledError
        if fault is Fault.DIES:
            self._server.die()
        lost = fault in {Fault.SLOW, Fault.CUT_BEFORE, Fault.GARBAGE}
        return self._server.up and self._server.boots == self._boot and not lost
