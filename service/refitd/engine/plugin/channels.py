"""An engine's crew: found among the sockets of the root, kept as long as they stay the same, and spoken to.

Looking is cheap (a listing), so it is done at each probe; greeting everyone is not, so it is done when a socket has
come or gone, when the engine is another process, and now and then while there is no crew.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from refitd.engine.plugin.crew import NOBODY, Crew, Launch, Member, Stock, crew_of
from refitd.engine.plugin.folder import Listing, listing
from refitd.engine.plugin.hello import read_hello, shown
from refitd.engine.plugin.line import LineError, NobodyError, ask
from refitd.engine.plugin.trust import open_to_all

HELLO_SECONDS = 2.0
AGAIN_SECONDS = 10.0  # between two rounds of hellos while there is no crew and no socket has come or gone
_NO_ROOT = Stock("the service has no root to find its plugin in")


class Channels:
    """The sockets of a root, as one engine's adapter sees them. Calls may overlap."""

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self._seen: tuple[Launch, tuple[str, ...]] | None = None
        self._crew: Crew | Stock = _NO_ROOT
        self._again_at = 0.0

    def doubt(self) -> None:
        """A member did not answer: greet all again at the next look."""
        self._seen = None

    async def crew(self, launch: Launch) -> Crew | Stock:
        """Who speaks for the engine that was started so. Takes seconds at most."""
        if self._root is None:
            return _NO_ROOT
        try:
            async with _opened(self._root) as found:
                return await self._look(launch, found)
        except FileNotFoundError:
            return Stock(NOBODY)
        except OSError as error:
            return Stock(f"the plugin's sockets cannot be looked at: {error}")

    async def _look(self, launch: Launch, found: Listing) -> Crew | Stock:
        seen, now = (launch, found.names), time.monotonic()
        if seen != self._seen or (isinstance(self._crew, Stock) and now >= self._again_at):
            self._crew = await _greeted(launch, found)
            self._seen, self._again_at = seen, now + AGAIN_SECONDS
        return self._crew

    async def ask_all(
        self, members: Sequence[Member], request: dict[str, Any], within: float
    ) -> list[dict[str, Any] | LineError]:
        """One request to several members at once; a reply or its absence for each, in their order."""
        if self._root is None:
            return [LineError("is nowhere") for _ in members]
        try:
            async with _opened(self._root) as found:
                asked = (_reply(found, member.socket, request, within) for member in members)
                return await asyncio.gather(*asked)
        except OSError as error:
            return [LineError(f"cannot be reached: {error}") for _ in members]


async def _greeted(launch: Launch, found: Listing) -> Crew | Stock:
    if open_to_all(found.keeper):
        return Stock("everyone may write to the folder of the plugin's sockets: make it 0770 (chmod o-w)")
    replies = await asyncio.gather(*(_reply(found, name, {"do": "hello"}, HELLO_SECONDS) for name in found.names))
    members: list[Member] = []
    faults: list[str] = []
    left_over: list[str] = []
    for name, reply in zip(found.names, replies, strict=True):
        hello = str(reply) if isinstance(reply, LineError) else read_hello(reply)
        if isinstance(hello, str):
            (left_over if isinstance(reply, NobodyError) else faults).append(f"socket {shown(name)} {hello}")
        else:
            members.append(Member(name, hello))
    return crew_of(launch, members, [*faults, *left_over])


async def _reply(found: Listing, name: str, request: dict[str, Any], within: float) -> dict[str, Any] | LineError:
    try:
        return await ask(found.descriptor, name, found.keeper, request, within)
    except LineError as error:
        return error


@asynccontextmanager
async def _opened(root: Path) -> AsyncGenerator[Listing]:
    """Open and list in a thread: the root may be on a disk that is slow to answer."""
    context = listing(root)
    found = await asyncio.to_thread(context.__enter__)
    try:
        yield found
    finally:
        context.__exit__(None, None, None)
