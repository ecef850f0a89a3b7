"""Work for a client that may leave: when it does, the work is cancelled."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

T = TypeVar("T")


class ClientLeftError(Exception):
    """Nobody is there to be answered."""


async def while_connected(http: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Raises ClientLeftError, after `work` has ended, if the client left first."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(http))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
    if task.cancelled():
        raise ClientLeftError
    return task.result()


async def _gone(http: Request) -> None:
    """Return when the client has left. The body has been read by now, so what comes next can only be that."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
