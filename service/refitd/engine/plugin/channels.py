"""An engine's ranks: found among the sockets of the root, kept as long as they stay the same, and spoken to.

Looking is cheap (a listing), so it is done at each probe; greeting everyone is not, so it is done when a socket has
come or gone, when the engine is another process, and now and then while there is no rank group.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from refitd.engine.plugin.exchange import ChannelError, LeftOverError, ask
from refitd.engine.plugin.folder import Listing, listing
from refitd.engine.plugin.handshake import read_handshake, shown
from refitd.engine.plugin.rank_group import NOBODY, EngineRankGroup, Launch, Member, Stock, rank_group_of
from refitd.engine.plugin.trust import open_to_all

HANDSHAKE_SECONDS = 2.0
AGAIN_SECONDS = 10.0  # between two rounds of handshakes while there is no rank group and no socket has come or gone
_NO_ROOT = Stock("the service has no root to find its plugin in")


class Channels:
    """The sockets of a root, as one engine's adapter sees them. Calls may overlap."""

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self._seen: tuple[Launch, tuple[str, ...]] | None = None
        self._rank_group: EngineRankGroup | Stock = _NO_ROOT
        self._again_at = 0.0

    def doubt(self) -> None:
        """A member did not answer: greet all again at the next look."""
        self._seen = None

    async def rank_group(self, launch: Launch) -> EngineRankGroup | Stock:
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

    async def _look(self, launch: Launch, found: Listing) -> EngineRankGroup | Stock:
        seen, now = (launch, found.names), time.monotonic()
        if seen != self._seen or (isinstance(self._rank_group, Stock) and now >= self._again_at):
            self._rank_group = await _greeted(launch, found)
            self._seen, self._again_at = seen, now + AGAIN_SECONDS
        return self._rank_group

    async def ask_all(
        self, members: Sequence[Member], request: dict[str, Any], within: float
    ) -> list[dict[str, Any] | ChannelError]:
        """One request to several members at once; a reply or its absence for each, in their order."""
        if self._root is None:
            return [ChannelError("is nowhere") for _ in members]
        try:
            async with _opened(self._root) as found:
                asked = (_reply(found, member.socket, request, within) for member in members)
                return await asyncio.gather(*asked)
        except OSError as error:
            return [ChannelError(f"cannot be reached: {error}") for _ in members]


async def _greeted(launch: Launch, found: Listing) -> EngineRankGroup | Stock:
    if open_to_all(found.access):
        return Stock("everyone may write to the folder of the plugin's sockets: make it 0770 (chmod o-w)")
    replies = await asyncio.gather(*(_reply(found, name, {"do": "hello"}, HANDSHAKE_SECONDS) for name in found.names))
    members: list[Member] = []
    faults: list[str] = []
    left_over: list[str] = []
    for name, reply in zip(found.names, replies, strict=True):
        handshake = str(reply) if isinstance(reply, ChannelError) else read_handshake(reply)
        if isinstance(handshake, str):
            (left_over if isinstance(reply, LeftOverError) else faults).append(f"socket {shown(name)} {handshake}")
        else:
            members.append(Member(name, handshake))
    return rank_group_of(launch, members, [*faults, *left_over])


async def _reply(found: Listing, name: str, request: dict[str, Any], within: float) -> dict[str, Any] | ChannelError:
    try:
        return await ask(found.descriptor, name, found.access, request, within)
    except ChannelError as error:
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
