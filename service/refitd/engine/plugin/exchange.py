"""One request and its reply over a rank's socket: a line of JSON each way (docs/plugin.md).

The socket is reached through a descriptor of its folder, so that nothing above it can be swapped and its name may be
long. Who listens there is asked of the kernel before a byte is sent.
"""

import asyncio
import os
import socket
import struct
from typing import Any

import msgspec

from refitd.engine.plugin.handshake import shown
from refitd.engine.plugin.trust import FolderAccess, Peer, distrust
from refitd_client.contract.plugin import MAX_LINE

_SO_PEERGROUPS = 59  # Linux 4.13; Python has no name for it
_MOST_GROUPS = 65536
_CREDENTIALS = struct.Struct("3i")


class ChannelError(Exception):
    """There is no reply. The message is a sentence without a subject."""


class LeftOverError(ChannelError):
    """The process that made the socket is gone."""


async def ask(folder: int, name: str, access: FolderAccess, request: dict[str, Any], within: float) -> dict[str, Any]:
    """Ask the rank that listens at `name` in `folder` (a descriptor), within seconds. Closes the line in any case.

    Raises:
        LineError: nobody listens, it is not to be trusted, or it does not answer as agreed.
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
        raise LeftOverError("is left over: nobody listens there") from error
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
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ChannelError("answered something that is no JSON object") from error


def _peer(connection: socket.socket) -> Peer:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, gid = _CREDENTIALS.unpack(raw)
    return Peer(uid, {gid, *_groups(connection)})


def _groups(connection: socket.socket) -> tuple[int, ...]:
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MOST_GROUPS)
    except OSError:
        return ()  # a kernel without it: the first group will have to do
    return struct.unpack(f"{len(raw) // 4}I", raw)
