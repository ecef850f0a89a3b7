"""The facades of all engines, in a process beside the service: generation must not wait for its work."""

import asyncio
import resource
import signal
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

from starlette.applications import Starlette

from refitd.api.connection import ConnectionSlots, Patience
from refitd.api.server import BoundedServer
from refitd_front.areal.facade import HEALTH, Facade
from refitd_front.areal.group_calls import GroupCalls
from refitd_front.areal.updates import Updates

CLOSE_SECONDS = 5
# A trainer has a connection for each rollout.
PATIENCE = Patience(slots=ConnectionSlots(all=2048, peer=1024, health=16))
Say = Callable[[str, str], None]


class _Server(BoundedServer):
    close_seconds = CLOSE_SECONDS

    def __init__(self, engine: str, app: Starlette, host: str, port: int, say: Say) -> None:
        super().__init__(app, host, port, patience=PATIENCE, health=HEALTH)
        self._engine = engine
        self._say = say

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    def listens(self, url: str) -> None:
        self._say(self._engine, url)


def allow_many_connections() -> None:
    """Raise the limit of file descriptors as far as the system allows: each request needs two."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def serve_facades(
    facades: Mapping[str, tuple[Facade, int]], host: str, updates: Updates, groups: GroupCalls, say: Say
) -> None:
    """Serve each engine's facade on its port, until SIGTERM or SIGINT. Updates and groups are closed at the end.

    Args:
        facades: by the engine's URL, with the facade's port.
        say: is called with the engine and the facade's URL for each facade that listens.
    """
    servers = [_Server(engine, facade.app(), host, port, say) for engine, (facade, port) in facades.items()]
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(server.serve()) for server in servers]
            await stop.wait()
            for server in servers:
                server.should_exit = True
            await asyncio.gather(*running)
    finally:
        await groups.aclose()
        updates.close()
        for facade, _ in facades.values():
            await facade.aclose()
