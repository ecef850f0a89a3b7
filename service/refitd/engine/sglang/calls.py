"""Calls to an SGLang server around a load: pause it, wait for it, prove what it holds, resume it."""

import asyncio

from refitd.engine.http import CHECKSUMS_BYTES, NoReply, Reply, Transport
from refitd.engine.limits import CALL_SECONDS, CHECK_SECONDS
from refitd.engine.load_reply import Untouched
from refitd.engine.sglang.reply import was_done, what_happened
from refitd.engine.sglang.verify import checksums_in, digest_of

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


async def resume(http: Transport) -> bool:
    """Let it generate; False if the call did not succeed."""
    reply = await http.post("/continue_generation", {"torch_empty_cache": False}, CALL_SECONDS)
    return isinstance(reply, Reply) and was_done(reply)


async def contents(http: Transport) -> str | NoReply | None:
    """The fingerprint of what it holds, by its own checksums; None where it does not tell."""
    reply = await checksums(http)
    if isinstance(reply, NoReply):
        return reply
    found = await asyncio.to_thread(checksums_in, reply)
    return None if found is None else await asyncio.to_thread(digest_of, found)


async def checksums(http: Transport) -> Reply | NoReply:
    """Ask for the checksums of all tensors."""
    return await http.post("/weights_checker", {"action": "checksum"}, CHECK_SECONDS, most=CHECKSUMS_BYTES)


async def settle(http: Transport, within: float) -> str | None:
    """Wait until a load that was sent before has ended; why that is not known, None where it has.

    /server_info goes through the loop that loads.
    """
    reply = await http.get("/server_info", within)
    return f"a load may still be running: {reply.reason}" if isinstance(reply, NoReply) else None
