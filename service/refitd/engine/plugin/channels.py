"""An engine's ranks, found among the sockets of the root, and requests to them.

At each probe the sockets are listed, in a thread; engines that are probed within `LISTED_SECONDS` share what was found.
All ranks are asked for a handshake when a socket has come or gone, when the engine is another process, and every
`AGAIN_SECONDS` while there is no rank group. Then the sockets are listed anew.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from refitd.engine.plugin.exchange import (
    ChannelError,
    LeftOverError,
    RankSockets,
    SocketFolder,
    SocketNames,
    ask,
    list_once,
    listing,
    open_to_all,
    opening,
)
from refitd.engine.plugin.rank_group import (
    NO_PLUGIN,
    EngineRankGroup,
    Launch,
    Member,
    Stock,
    rank_group_of,
    read_handshake,
    shown,
)

HANDSHAKE_SECONDS = 2.0
AGAIN_SECONDS = 10.0  # between two rounds of handshakes while there is no rank group and no socket has come or gone
LISTED_SECONDS = 1.0
FoundT = TypeVar("FoundT")
_NO_ROOT = Stock("the service has no root to find its plugin in")


class SocketList:
    """The names of the sockets beneath a root, listed once for all engines that are probed within seconds."""

    def __init__(self, root: Path, seconds: float = LISTED_SECONDS) -> None:
        self._root = root
        self._seconds = seconds
        self._listed = SocketNames(None, ())
        self._until = -1.0

    async def recent(self) -> SocketNames:
        """What was found at most `seconds` ago.

        Raises:
            OSError: the folder cannot be listed.
        """
        if time.monotonic() >= self._until:
            self._listed = await asyncio.to_thread(list_once, self._root)
            self._until = time.monotonic() + self._seconds
        return self._listed


class Channels:
    """The sockets of a root, for one engine's adapter. Calls may overlap. `sockets` is what all adapters share."""

    def __init__(self, root: Path | None, sockets: SocketList | None = None) -> None:
        self._root = root
        self._sockets = sockets if sockets is not None or root is None else SocketList(root, seconds=0.0)
        self._seen: tuple[Launch, SocketNames] | None = None
        self._rank_group: EngineRankGroup | Stock = _NO_ROOT
        self._again_at = 0.0

    def doubt(self) -> None:
        """A rank did not answer: ask all for a handshake again at the next look."""
        self._seen = None

    async def rank_group(self, launch: Launch) -> EngineRankGroup | Stock:
        """Find the ranks of the engine that was started so. Takes seconds at most."""
        if self._root is None or self._sockets is None:
            return _NO_ROOT
        try:
            if self._seen is not None and self._seen[0] == launch:
                listed = await self._sockets.recent()
                is_due = isinstance(self._rank_group, Stock) and listed.names and time.monotonic() >= self._again_at
                if listed == self._seen[1] and not is_due:
                    return self._rank_group
            async with _in_thread(listing(self._root)) as found:
                seen = launch, SocketNames(found.folder.access, found.names)
                self._rank_group = await _greeted(launch, found)
                self._seen, self._again_at = seen, time.monotonic() + AGAIN_SECONDS
        except FileNotFoundError:
            self._rank_group, self._seen = Stock(NO_PLUGIN), (launch, SocketNames(None, ()))
        except OSError as error:
            return Stock(f"the plugin's sockets cannot be listed: {error}")
        return self._rank_group

    async def ask_all(
        self, members: Sequence[Member], request: dict[str, Any], within: float
    ) -> list[dict[str, Any] | ChannelError]:
        """Send one request to several ranks at once.

        Args:
            members: the ranks.
            request: as docs/plugin.md has it.
            within: seconds that each may take.

        Returns:
            A reply, or why there is none, for each rank in their order.
        """
        if self._root is None:
            return [ChannelError("is nowhere") for _ in members]
        try:
            # Not listed: a root of many engines has many sockets, and each costs a network file system a question.
            async with _in_thread(opening(self._root)) as folder:
                asked = (_reply(folder, member.socket, request, within) for member in members)
                return await asyncio.gather(*asked)
        except OSError as error:
            return [ChannelError(f"cannot be reached: {error}") for _ in members]


async def _greeted(launch: Launch, found: RankSockets) -> EngineRankGroup | Stock:
    if open_to_all(found.folder.access):
        return Stock("everyone may write to the folder of the plugin's sockets: make it 0770 (chmod o-w)")
    replies = await asyncio.gather(
        *(_reply(found.folder, name, {"do": "hello"}, HANDSHAKE_SECONDS) for name in found.names)
    )
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


async def _reply(
    folder: SocketFolder, name: str, request: dict[str, Any], within: float
) -> dict[str, Any] | ChannelError:
    try:
        return await ask(folder.descriptor, name, folder.access, request, within)
    except ChannelError as error:
        return error


@asynccontextmanager
async def _in_thread(context: AbstractContextManager[FoundT]) -> AsyncGenerator[FoundT]:
    """Open it in a thread: the root may be on a disk that is slow to answer."""
    found = await asyncio.to_thread(context.__enter__)
    try:
        yield found
    finally:
        context.__exit__(None, None, None)
