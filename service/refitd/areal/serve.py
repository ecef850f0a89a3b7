"""The facades of all engines and the watch, in one process beside the service: generation goes through here, and must
not wait for what the service does.
"""

import asyncio
import signal
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from socket import socket

import uvicorn
from starlette.applications import Starlette

from refitd.areal.facade import Facade
from refitd.areal.record import RecordWatch
from refitd.areal.updates import Updates

CLOSE_SECONDS = 5
Say = Callable[[str | None, str | None], None]


class _Server(uvicorn.Server):
    """One facade's. Signals are for all of them together."""

    def __init__(self, engine: str, app: Starlette, host: str, port: int, say: Say) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=CLOSE_SECONDS,
            )
        )
        self._engine = engine
        self._say = say

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave the process's signals alone."""
        yield

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Listen, and say where."""
        await super().startup(sockets)
        if self.started:
            port = self.servers[0].sockets[0].getsockname()[1]
            self._say(self._engine, f"http://{self.config.host}:{port}")


async def serve_facades(
    facades: Mapping[str, tuple[Facade, int]], host: str, updates: Updates, watch: RecordWatch | None, say: Say
) -> None:
    """Serve each engine's facade on its port, and watch the record, until SIGTERM or SIGINT.

    `say` hears of each facade that listens (the engine, the facade's URL); without any, that the watch has begun.
    """
    servers = [_Server(engine, facade.app(), host, port, say) for engine, (facade, port) in facades.items()]
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(server.serve()) for server in servers]
            watching = None if watch is None else group.create_task(watch.run())
            if watch is not None and not servers:
                say(None, None)
            await stop.wait()
            for server in servers:
                server.should_exit = True
            await asyncio.gather(*running)
            if watching is not None:
                watching.cancel()
    finally:
        updates.close()
        for facade, _ in facades.values():
            await facade.aclose()
