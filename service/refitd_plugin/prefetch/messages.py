"""What a rank and its prefetch worker say to each other, and how it travels. One order at a time, one reply to each.

On the socket a message is its length (8 bytes) and the number of files that come with it (4), and then its bytes. The
files come with the first of them (SCM_RIGHTS, unix(7)).
"""

import os
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

import msgspec

from refitd_client.checkpoint.opening import FileStat
from refitd_client.checkpoint.strict_header import Header
from refitd_client.contract.manifest import Manifest
from refitd_plugin.layout import PlacedTensor

MOST_FILES = 200  # the kernel takes 253 in a message
MOST_BYTES = 2**28
_BODY_SECONDS = 30.0
_MESSAGE_HEAD = struct.Struct("<QI")


class ReadOrder(msgspec.Struct, tag=True, kw_only=True):
    """Look at a version.

    `model` is the folder that full versions are held against, and that says how much memory a delta may take (empty: it
    cannot be found); `layout` is the one whose headers the rank has; `busy` are the buffers that it still uses.
    `placements` come once, with the number that is named from then on in `along` (0: none).
    """

    root: str
    path: str
    model: str
    check_bytes: bool
    allow_missing: tuple[str, ...] = ()
    allow_extra: bool = False
    allow_dtype_cast: bool = False
    layout: str = ""
    busy: list[int] = []
    placements: dict[str, PlacedTensor] | None = None
    along: int = 0


class Stop(msgspec.Struct, tag=True):
    """Stop reading. The reply to the order still comes."""


class FullFound(msgspec.Struct, tag=True, kw_only=True):
    """A full version. Its weight files come with it, opened, in the order of `names`. `headers` are left out where the
    rank has those of this `layout`.
    """

    signature: str
    files: dict[str, FileStat]
    manifest: Manifest | None
    inventory: str
    layout: str
    headers: dict[str, Header] | None
    names: list[str]
    ms: float = 0.0


class BufferArray(msgspec.Struct, array_like=True):
    """Where an array lies: its buffer's number, its first byte, its length in elements, numpy's name of its type."""

    buffer: int
    begin: int
    count: int
    dtype: str


class PlacedGroup(msgspec.Struct, array_like=True):
    """As `refitd_plugin.layout.PieceGroup`; `table` as it lies in memory."""

    indices: BufferArray
    values: BufferArray
    table: bytes


class DeltaFound(msgspec.Struct, tag=True, kw_only=True):
    """A delta, laid out where placements were sent. Its file comes with it, and after it the buffers that groups lie in
    (number and size of each). `kept` are all buffers that there are.
    """

    manifest: Manifest
    files: list[FileStat]
    results: dict[str, int]
    nbytes: int
    along: int
    names: list[str]
    whole: list[bool]
    groups: list[PlacedGroup]
    buffers: list[tuple[int, int]]
    kept: list[int]
    ms: float = 0.0


class Refusal(msgspec.Struct, tag=True):
    """The version cannot be loaded or looked at. `unable`: the worker cannot say which, and the rank looks itself."""

    kind: Literal["refused", "full", "stopped", "unreadable", "unable"]
    reason: str = ""


WorkerMessage = ReadOrder | Stop


Reply = FullFound | DeltaFound | Refusal


class LineLostError(Exception):
    """The other side is gone, or what it sends is no message."""


def send(line: socket.socket, message: Any, files: Sequence[int] = ()) -> None:
    """Send a message and open files.

    Args:
        line: the socket.
        message: one of the structs above.
        files: descriptors, which stay the caller's.

    Raises:
        OSError: the other side is gone.
    """
    body = msgspec.msgpack.encode(message)
    socket.send_fds(line, [_MESSAGE_HEAD.pack(len(body), len(files))], files)
    line.sendall(body)


def receive(line: socket.socket, decoder: msgspec.msgpack.Decoder[Any]) -> tuple[Any, list[int]]:
    """The next message, and the files that came with it: the caller's to close.

    Raises:
        TimeoutError: none has begun to come within the socket's time-out, or SO_RCVTIMEO.
        LineLostError: the other side is gone, or what it sends is no message.
    """
    files: list[int] = []
    try:
        head, files, _, _ = socket.recv_fds(line, _MESSAGE_HEAD.size, MOST_FILES)
        return decoder.decode(_receive_all(line, _body_length(head, len(files)))), files
    except (TimeoutError, BlockingIOError):
        raise TimeoutError from None
    except (OSError, msgspec.MsgspecError, LineLostError) as error:
        for file in files:
            os.close(file)
        raise LineLostError(f"{error}") from error


def _body_length(head: bytes, files: int) -> int:
    if len(head) < _MESSAGE_HEAD.size:
        raise LineLostError("the other side is gone")
    length, count = _MESSAGE_HEAD.unpack(head)
    if length > MOST_BYTES or count != files:
        raise LineLostError("a message is too long, or its files did not come")
    return int(length)


def _receive_all(line: socket.socket, length: int) -> bytearray:
    """Wait longer than the socket's time-out, and for a time in all: the message has begun to come."""
    data, deadline = bytearray(length), time.monotonic() + _BODY_SECONDS
    view = memoryview(data)
    while view:
        if time.monotonic() > deadline:
            raise LineLostError("a message breaks off")
        with suppress(TimeoutError, BlockingIOError):
            count = line.recv_into(view, 0, socket.MSG_WAITALL)
            if not count:
                raise LineLostError("the other side is gone")
            view = view[count:]
    return data
