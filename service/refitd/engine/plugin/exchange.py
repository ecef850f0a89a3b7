"""The sockets of engines' ranks in `<root>/.refitd/engines`: listing them, trusting them, one request and its reply.

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
from collections.abc import Collection, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from refitd.engine.plugin.rank_group import shown
from refitd_client.contract.decoding import plain_json
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.contract.plugin import ENGINES_FOLDER, MAX_LINE, PEER_CREDENTIALS, is_socket_name
from refitd_client.files.plain_file import open_folder

_ROOT = 0
_SO_PEERGROUPS = 59  # Linux 4.13; Python has no name for it
_MOST_GROUPS = 65536
_REPLY_VALUES = 1000  # of a reply
MOST_SOCKETS = 512  # the newest: the others are leftovers


class ChannelError(Exception):
    """There is no reply. The message is a sentence without a subject."""


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
    """The folder as it is now. `descriptor` is open as long as the context that gave it."""

    descriptor: int
    access: FolderAccess


@dataclass(frozen=True, slots=True)
class RankSockets:
    """The folder and the names of its sockets, as they are now."""

    folder: SocketFolder
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SocketNames:
    """What was in the folder when it was listed: its sockets' names. `access` is None where there is no folder."""

    access: FolderAccess | None
    names: tuple[str, ...]


@contextmanager
def opening(root: Path) -> Generator[SocketFolder]:
    """Open the folder beneath a root. Links are not followed.

    Raises:
        OSError: there is none (FileNotFoundError), or a part of it is a link.
    """
    descriptor = _open(root)
    try:
        status = os.fstat(descriptor)
        yield SocketFolder(descriptor, FolderAccess(status.st_uid, status.st_gid, status.st_mode))
    finally:
        os.close(descriptor)


@contextmanager
def listing(root: Path) -> Generator[RankSockets]:
    """Open the folder beneath a root and list its sockets, the newest first. Links are not followed.

    Raises:
        OSError: there is none (FileNotFoundError), a part of it is a link, or it cannot be listed.
    """
    with opening(root) as folder:
        yield RankSockets(folder, _sockets(folder.descriptor))


def list_once(root: Path) -> SocketNames:
    """List the sockets beneath a root, the newest first. Blocks.

    Raises:
        OSError: a part of the folder is a link, or it cannot be listed.
    """
    try:
        with listing(root) as found:
            return SocketNames(found.folder.access, found.names)
    except FileNotFoundError:
        return SocketNames(None, ())


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
    """Whether everyone may make sockets in the folder."""
    return bool(access.mode & stat.S_IWOTH)


async def ask(folder: int, name: str, access: FolderAccess, request: dict[str, Any], within: float) -> dict[str, Any]:
    """Ask the rank that listens at `name` in `folder` (a descriptor), within seconds. Closes the line in any case.

    Raises:
        ChannelError: no process listens, it is not trusted, or its answer has another form.
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
