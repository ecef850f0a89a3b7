"""An engine's ranks, found among the sockets of the root (`<root>/.refitd/engines`), and requests to them.

looking   At each probe the sockets are listed, in a thread; engines that are probed within `LISTED_SECONDS` share what
          was found. All ranks are asked for a handshake when a socket has come or gone, when the engine is another
          process, and every `AGAIN_SECONDS` while there is no rank group. Then the sockets are listed anew.
listing   Processes that were killed leave their sockets behind, and any process that may write there can put a link, a
          FIFO or a file in their place. What is no socket, or has another name than the plugin gives, is skipped.
trust     The folder is for refitd and its engines, mode 0770. A process is believed where the kernel says that it runs
          as the service's own user, as root, as the folder's owner, or as a member of the folder's group. The kernel is
          asked before a byte is sent.
request   A line of JSON each way (docs/plugin.md). The socket is reached through a descriptor of its folder, so that
          nothing above it can be swapped, and its name may be long.
"""

import asyncio
import os
import socket
import stat
import struct
import time
from collections.abc import AsyncGenerator, Collection, Generator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from refitd_client.contract.decoding import plain_json
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.contract.plugin import ENGINES_FOLDER, MAX_LINE, PEER_CREDENTIALS, is_socket_name
from refitd_client.files.plain_file import open_folder
from refitd_inside.client import (
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
_ROOT = 0
_SO_PEERGROUPS = 59  # Linux 4.13; Python has no name for it
_MOST_GROUPS = 65536
_REPLY_VALUES = 1000  # of a reply
MOST_SOCKETS = 512  # the newest: the others are leftovers


class ChannelError(Exception):
    """A rank gave no reply. The message is a sentence without a subject."""


class LeftOverError(ChannelError):
    """The process that made the socket is gone."""


@dataclass(frozen=True, slots=True)
class FolderAccess:
    """Who may make sockets in the folder: its owner, its group, its mode."""

    uid: int
    gid: int
    mode: int


@dataclass(frozen=True, slots=True)
class SocketFolder:
    """The folder as it is now, and its sockets, the newest first, where it was listed. `descriptor` is open as long as
    the context.
    """

    access: FolderAccess
    names: tuple[str, ...]
    descriptor: int = field(compare=False)


@contextmanager
def opening(root: Path, *, lists: bool = False) -> Generator[SocketFolder]:
    """Open the folder beneath a root. Links are not followed.

    Raises:
        OSError: there is none (FileNotFoundError), a part of it is a link, or it cannot be listed.
    """
    descriptor = _open(root)
    try:
        status = os.fstat(descriptor)
        access = FolderAccess(status.st_uid, status.st_gid, status.st_mode)
        yield SocketFolder(access, _sockets(descriptor) if lists else (), descriptor)
    finally:
        os.close(descriptor)


def list_once(root: Path) -> SocketFolder | None:
    """List the sockets beneath a root; None where there is no folder. Blocks; raises OSError as `opening`."""
    with suppress(FileNotFoundError), opening(root, lists=True) as found:
        return found
    return None


def _open(root: Path) -> int:
    descriptor = open_folder(root, follow=True)
    for part in (SERVICE_FOLDER, ENGINES_FOLDER):
        above = descriptor
        try:
            descriptor = open_folder(part, within=above)
        finally:
            os.close(above)
    return descriptor


def _sockets(descriptor: int) -> tuple[str, ...]:
    found: dict[str, int] = {}
    for name in os.listdir(descriptor):
        if is_socket_name(name):
            with suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                if stat.S_ISSOCK(status.st_mode):
                    found[name] = status.st_mtime_ns
    return tuple(sorted(found, key=lambda name: (-found[name], name))[:MOST_SOCKETS])


def open_to_all(access: FolderAccess) -> bool:
    return bool(access.mode & stat.S_IWOTH)


async def ask(folder: int, name: str, access: FolderAccess, request: dict[str, Any], within: float) -> dict[str, Any]:
    """Ask the rank that listens at `name` in `folder` (a descriptor), within seconds. Raises ChannelError: no process
    listens, it is not trusted, or its answer has another form.
    """
    try:
        async with asyncio.timeout(within):
            reader, writer = await asyncio.open_unix_connection(f"/proc/self/fd/{folder}/{name}", limit=MAX_LINE)
            try:
                return await _asked(reader, writer, access, request)
            finally:
                writer.close()
    except TimeoutError as error:
        raise ChannelError(f"did not answer within {within:g} s") from error
    except ConnectionRefusedError as error:
        raise LeftOverError("is left over: no process listens there") from error
    except (OSError, ValueError) as error:  # asyncio raises ValueError for a line that is too long
        raise ChannelError(f"cannot be spoken to: {shown(str(error))}") from error


async def _asked(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, access: FolderAccess, request: dict[str, Any]
) -> dict[str, Any]:
    if (reason := distrust(_peer(writer.get_extra_info("socket")), access, os.geteuid())) is not None:
        raise ChannelError(reason)
    writer.write(msgspec.json.encode(request) + b"\n")
    await writer.drain()
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise ChannelError("broke off without an answer")
    try:
        reply = plain_json(line, _REPLY_VALUES)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ChannelError("answered something that is no JSON object, or a large one") from error
    if not isinstance(reply, dict):
        raise ChannelError("answered something that is no JSON object")
    return cast("dict[str, Any]", reply)


@dataclass(frozen=True, slots=True)
class Peer:
    """The process that listens (SO_PEERCRED, SO_PEERGROUPS in unix(7))."""

    uid: int
    gids: Collection[int]


def distrust(peer: Peer, access: FolderAccess, own: int) -> str | None:
    """Why the process is not believed, in a sentence without a subject; None where it is. `own` is the service's user.

    A container with users of its own shows as user 65534: give service and engines one user namespace.
    """
    if peer.uid in {_ROOT, own, access.uid}:
        return None
    if access.mode & stat.S_IWGRP and access.gid in peer.gids:
        return None
    return f"belongs to user {peer.uid}, who is not of the group {access.gid} of the folder"


def _peer(connection: socket.socket) -> Peer:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS.size)
    _, uid, gid = PEER_CREDENTIALS.unpack(raw)
    return Peer(uid, {gid, *_groups(connection)})


def _groups(connection: socket.socket) -> tuple[int, ...]:
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MOST_GROUPS)
    except OSError:
        return ()  # a kernel without it: the first group will have to do
    return struct.unpack(f"{len(raw) // 4}I", raw)


class SocketList:
    """The names of the sockets beneath a root, listed once for all engines that are probed within seconds."""

    def __init__(self, root: Path, seconds: float = LISTED_SECONDS) -> None:
        self._root = root
        self._seconds = seconds
        self._listed: SocketFolder | None = None
        self._until = -1.0

    async def recent(self) -> SocketFolder | None:
        """What was found at most `seconds` ago. Raises OSError: the folder cannot be listed."""
        if time.monotonic() >= self._until:
            self._listed = await asyncio.to_thread(list_once, self._root)
            self._until = time.monotonic() + self._seconds
        return self._listed


class Channels:
    """The sockets of a root, for one engine's adapter. Calls may overlap. `sockets` is what all adapters share."""

    def __init__(self, root: Path | None, sockets: SocketList | None = None) -> None:
        self._root = root
        self._sockets = sockets if sockets is not None or root is None else SocketList(root, seconds=0.0)
        self._seen: tuple[Launch, SocketFolder | None] | None = None
        self._rank_group: EngineRankGroup | Stock = _NO_ROOT
        self._again_at = 0.0

    def doubt(self) -> None:
        """Ask all ranks for a handshake again at the next look: one did not answer."""
        self._seen = None

    async def rank_group(self, launch: Launch) -> EngineRankGroup | Stock:
        if self._root is None or self._sockets is None:
            return _NO_ROOT
        try:
            if self._seen is not None and self._seen[0] == launch:
                listed = await self._sockets.recent()
                has_sockets = listed is not None and listed.names
                is_due = isinstance(self._rank_group, Stock) and has_sockets and time.monotonic() >= self._again_at
                if listed == self._seen[1] and not is_due:
                    return self._rank_group
            async with _in_thread(opening(self._root, lists=True)) as found:
                self._rank_group = await _greeted(launch, found)
                self._seen, self._again_at = (launch, found), time.monotonic() + AGAIN_SECONDS
        except FileNotFoundError:
            self._rank_group, self._seen = Stock(NO_PLUGIN), (launch, None)
        except OSError as error:
            return Stock(f"the plugin's sockets cannot be listed: {error}")
        return self._rank_group

    async def ask_all(
        self, members: Sequence[Member], request: dict[str, Any], within: float
    ) -> list[dict[str, Any] | ChannelError]:
        """Send one request (docs/plugin.md) to several ranks at once. Returns a reply, or why there is none,
        for each.
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


async def _greeted(launch: Launch, found: SocketFolder) -> EngineRankGroup | Stock:
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


async def _reply(
    folder: SocketFolder, name: str, request: dict[str, Any], within: float
) -> dict[str, Any] | ChannelError:
    try:
        return await ask(folder.descriptor, name, folder.access, request, within)
    except ChannelError as error:
        return error


@asynccontextmanager
async def _in_thread(context: AbstractContextManager[FoundT]) -> AsyncGenerator[FoundT]:
    """Open a folder in a thread: the root may be on a disk that is slow to answer."""
    found = await asyncio.to_thread(context.__enter__)
    try:
        yield found
    finally:
        context.__exit__(None, None, None)
