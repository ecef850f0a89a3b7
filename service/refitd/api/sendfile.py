"""Sends a part of a file on a connection without copying it through Python: sendfile(2) in a thread.

Starlette reads files by 64 KiB through the event loop, which takes several times as long. An application sends the
message `http.response.zerocopysend` of the ASGI extension of that name, where the server's scope names the extension.
"""

import asyncio
import os
import select
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from socket import socket

PIECE = 8 * 2**20  # bytes that are handed to the kernel at a time
EXTENSION = "http.response.zerocopysend"
_CLOSED_LOOK_SECONDS = 0.5  # how often a thread that waits for its client looks whether the connection is closed
_SENDERS = ThreadPoolExecutor(64, "refitd-send")  # two for each of some thirty followers that pull at a time


class NotSentError(Exception):
    """The rest of a response could not be sent. The connection is to be closed: its client sees that bytes lack."""


async def send_part(
    to: socket, file: int, offset: int, count: int, *, patience: float, is_closed: Callable[[], bool]
) -> None:
    """Send bytes of a file. Returns when the kernel has taken them all, also if the caller is cancelled meanwhile.

    Args:
        to: the connected socket, which does not block.
        file: a descriptor.
        offset: of the first byte.
        count: how many.
        patience: seconds that the client may take for each `PIECE`, so that none holds a thread for ever.
        is_closed: says, in a thread, whether the connection is closed; then it is given up.

    Raises:
        NotSentError: the client is gone or too slow, or the file has become shorter.
    """
    try:
        own = os.dup(to.fileno())  # the connection may be closed meanwhile, and its number given to another
    except OSError as error:
        raise NotSentError("the connection is closed") from error
    loop = asyncio.get_running_loop()
    sending = loop.run_in_executor(_SENDERS, _send, own, file, offset, count, patience, is_closed)
    try:
        await asyncio.shield(sending)
    except asyncio.CancelledError:
        await asyncio.wait([sending])  # the thread uses the caller's descriptor
        raise
    finally:
        os.close(own)


def _send(to: int, file: int, offset: int, count: int, patience: float, is_closed: Callable[[], bool]) -> None:
    poll = select.poll()
    poll.register(to, select.POLLOUT)
    until, taken = time.monotonic() + patience, 0  # and what the client has taken of the piece
    try:
        while count:
            try:
                sent = os.sendfile(to, file, offset, min(count, PIECE))
            except BlockingIOError:
                poll.poll(_CLOSED_LOOK_SECONDS * 1000)
                if is_closed() or time.monotonic() >= until:
                    raise NotSentError("its client is gone, or too slow") from None
                continue
            if sent == 0:
                raise NotSentError("the file has become shorter")
            offset, count, taken = offset + sent, count - sent, taken + sent
            if taken >= PIECE:
                until, taken = time.monotonic() + patience, 0
    except OSError as error:
        raise NotSentError(str(error)) from error
