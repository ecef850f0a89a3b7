"""How the parts of a pull run side by side: tasks of which the first error counts, and calls in threads."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

AnswerT = TypeVar("AnswerT")


@asynccontextmanager
async def first_error() -> AsyncGenerator[asyncio.TaskGroup]:
    """A group of tasks whose first error is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def in_thread(call: Callable[..., AnswerT], *arguments: object) -> AnswerT:
    """Run a call in a thread to its end, also if the caller is cancelled meanwhile: it works on the caller's memory."""
    running = asyncio.ensure_future(asyncio.to_thread(call, *arguments))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # no task waits for it any more
        raise
