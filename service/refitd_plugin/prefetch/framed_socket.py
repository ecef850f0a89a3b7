"""A socket between two processes of one program, which carries messages and open files.

A message is its length (8 bytes) and the number of files that come with it (4), and then its bytes. The files come with
the first of them (SCM_RIGHTS, unix(7)).
"""

import os
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

import msgspec

MOST_FILES = 200  # the kernel takes 253 in a message
MOST_BYTES = 2**28
_BODY_SECONDS = 30.0
_HEAD = struct.Struct("<QI")


class LineLostError(Exception):
    """The other side is gone, or speaks nonsense."""


def send(line: socket.socket, message: Any, files: Sequence[int] = ()) -> None:
    """Send a message and open files, which stay the caller's.

    Raises:
        OSError: the other side is gone.
    """
    body = msgspec.msgpack.encode(message)
    socket.send_fds(line, [_HEAD.pack(len(body), len(files))], files)
    line.sendall(body)


def receive(line: socket.socket, decoder: msgspec.msgpack.Decoder[Any]) -> tuple[Any, list[int]]:
    """The next message, and the files that came with it: the caller's to close.

    Raises:
        TimeoutError: none has begun to come within the socket's time-out, or SO_RCVTIMEO.
        LineLostError: the other side is gone, or speaks nonsense.
    """
    files: list[int] = []
    try:
        head, files, _, _ = socket.recv_fds(line, _HEAD.size, MOST_FILES)
        return decoder.decode(_all(line, _length(head, len(files)))), files
    except (TimeoutError, BlockingIOError):
        raise TimeoutError from None
    except (OSError, msgspec.MsgspecError, LineLostError) as error:
        for file in files:
            os.close(file)
        raise LineLostError(f"{error}") from error


def _length(head: bytes, files: int) -> int:
    if len(head) < _HEAD.size:
        raise LineLostError("the other side is gone")
    length, count = _HEAD.unpack(head)
    if length > MOST_BYTES or count != files:
        raise LineLostError("a message is too long, or its files did not come")
    return int(length)


def _all(line: socket.socket, length: int) -> bytearray:
    """What has begun to come is waited for longer."""
    data, deadline = bytearray(length), time.monotonic() + _BODY_SECONDS
    view = memoryview(data)
    while view:
        try:
            count = line.recv_into(view, 0, socket.MSG_WAITALL)
        except (TimeoutError, BlockingIOError):
            if time.monotonic() < deadline:
                continue
            raise LineLostError("a message breaks off") from None
        if not count:
            raise LineLostError("the other side is gone")
        view = view[count:]
    return data
