"""Pausing a server, so that a load that flushes its cache finds nothing running."""

import asyncio

from refitd.engine.http import NoReply, Transport
from refitd.engine.sglang.reply import Untouched, was_done, what_happened

CALL_SECONDS = 30.0  # pause, resume, flush: seconds at most on a server that works
FLUSH_EVERY_SECONDS = 0.05


async def pause(http: Transport, mode: str, *, drains: bool) -> NoReply | str | None:
    """Pause; why it could not be done, None where it was. `drains`: wait as well until nothing runs any more."""
    reply = await http.post("/pause_generation", {"mode": mode}, CALL_SECONDS)
    if isinstance(reply, NoReply):
        return reply
    if not was_done(reply):
        happened = what_happened(reply)
        return happened.reason if isinstance(happened, Untouched) else f"cannot be paused: {reply.short_message}"
    return await _drained(http) if drains else None


async def _drained(http: Transport) -> NoReply | str | None:
    """Wait until a flush goes well: nothing runs any more, so the one that ends the load will not kill it."""
    try:
        async with asyncio.timeout(CALL_SECONDS):
            while True:
                reply = await http.post("/flush_cache", {}, CALL_SECONDS)
                if isinstance(reply, NoReply):
                    return reply
                if reply.ok:
                    return None
                await asyncio.sleep(FLUSH_EVERY_SECONDS)
    except TimeoutError:
        return f"requests still run {CALL_SECONDS:g} s after the pause; SGLang before 0.5.22 would die of the load"
