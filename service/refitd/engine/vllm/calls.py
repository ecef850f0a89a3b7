"""Calls to a vLLM server that take several requests: how it was started, caches and label for new weights."""

import asyncio
from dataclasses import dataclass

from refitd.engine.http import NoReply, Reply, Transport
from refitd.engine.limits import CALL_SECONDS
from refitd.engine.port import Obstacle
from refitd.engine.vllm.info import (
    CHECKER,
    LORA,
    NEEDED,
    NEVER_LABELLED,
    SLEEP,
    WAKE,
    VllmServerInfo,
    missing,
    read_label,
    read_release,
    read_server_info,
    said,
)

RESET_EVERY_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class AnotherWriter:
    """How it shows that another program has loaded or labelled something since a load began."""

    reason: str

    def __str__(self) -> str:
        return self.reason


async def ask_how_started(http: Transport) -> VllmServerInfo | Obstacle | str:
    """How a server was started and which routes it has, what a vLLM lacks, or why nothing can be said."""
    routes = (*NEEDED, CHECKER, LORA, SLEEP, WAKE)
    version, info, *found = await asyncio.gather(
        http.get("/version", CALL_SECONDS),
        http.get("/server_info?config_format=json", CALL_SECONDS),
        *(http.get(route, CALL_SECONDS) for route in routes),
    )
    release = read_release(version, http.url)
    if isinstance(release, str):
        return release
    exists = {route: isinstance(each, Reply) and each.status != 404 for route, each in zip(routes, found, strict=True)}
    if (fault := missing(release.version, exists, http.url)) is not None:
        return fault
    return read_server_info(release.version, info, exists, http.url)


async def pause(http: Transport, mode: str, within: float, *, at_once: bool) -> Reply | NoReply | None:
    """Have a server generate nothing. None where it says that nothing is computed any more, else what it says.

    Args:
        http: to the server.
        mode: what becomes of requests in flight.
        within: seconds at most.
        at_once: by the route that answers as soon as that is so: `Capabilities.pauses_at_once`.
    """
    reply = await http.post(f"{SLEEP}?level=0&mode={mode}" if at_once else f"/pause?mode={mode}", {}, within)
    return None if done(reply, "status", "sleeping" if at_once else "paused") else reply


async def resume(http: Transport, *, at_once: bool) -> bool:
    """Have a server generate again; whether it says that it does. `at_once`: as for `pause`."""
    if not at_once:
        return done(await http.post("/resume", {}, CALL_SECONDS), "status", "resumed")
    # Not /resume: vLLM's metrics would call it asleep from then on.
    return done(await http.post(f"{WAKE}?tags=scheduling", {}, CALL_SECONDS), "status", "awake")


async def label_of(http: Transport) -> str | None:
    """The label that a server has; None where it does not say."""
    told = read_label(await http.get("/weight_info", CALL_SECONDS), http.url)
    return None if isinstance(told, str) else told.weight_version


async def freshen(http: Transport, label: str, found: str | None, *, multimodal: bool) -> AnotherWriter | str | None:
    """Empty what other weights have computed, and set the label; why that did not go well, None where it did.

    Args:
        http: to the server.
        label: what it is to be.
        found: what it was before the load. Another one now says that another program has loaded something since.
        multimodal: whether the server keeps what its encoders computed.
    """
    if (fault := await relabelled(http, found)) is not None:
        return fault
    # At once: nothing is computed in the pause, so the order in which the server takes them does not matter.
    held_back, reply = await asyncio.gather(
        empty_caches(http, multimodal=multimodal),
        http.post("/update_weight_version", {"new_version": label}, CALL_SECONDS),
    )
    if held_back is not None:
        return held_back
    if not done(reply, "new_version", label):
        return f"its label was not set: {_why(reply)}"
    fault, paused = await asyncio.gather(relabelled(http, label), http.get("/is_paused", CALL_SECONDS))
    if fault is not None:
        return fault
    # A server that was restarted since the load would have its start-up weights under this label.
    if isinstance(paused, Reply) and paused.ok and (paused.data or {}).get("is_paused") is True:
        return None
    return "it is not paused any more: it was restarted, or another program has resumed it, during the update"


async def relabelled(http: Transport, label: str | None) -> AnotherWriter | str | None:
    """Why a server has another label than it had or was given; None where it has that one.

    No call sets a label on a condition, so it is looked at before and after.
    """
    named = read_label(await http.get("/weight_info", CALL_SECONDS), http.url)
    if isinstance(named, str):
        return named
    now = named.weight_version
    if now == label:
        return None
    if now == NEVER_LABELLED:
        return f"its label {label!r} is gone: it was restarted since the load began"
    return AnotherWriter(f"another program has labelled it {now!r}, and not {label!r}")


async def empty_caches(http: Transport, *, multimodal: bool) -> str | None:
    """Empty what other weights have computed, with requests running; why that did not go well, None where it did.

    `multimodal`: whether the server keeps what its encoders computed.
    """
    path = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
    try:
        async with asyncio.timeout(CALL_SECONDS):
            while not done(reply := await http.post(path, {}, CALL_SECONDS), "success", True):
                if not isinstance(reply, Reply) or not reply.ok:
                    return f"its cache was not emptied of what other weights have computed: {_why(reply)}"
                await asyncio.sleep(RESET_EVERY_SECONDS)  # blocks are still on their way to another store
    except TimeoutError:
        return f"its cache still holds what other weights have computed, {CALL_SECONDS:g} s after the load"
    for path in ("/reset_mm_cache", "/reset_encoder_cache") if multimodal else ():
        reply = await http.post(path, {}, CALL_SECONDS)
        if not isinstance(reply, Reply) or not reply.ok:
            return f"{path} did not go well: {_why(reply)}"
    return None


def done(reply: Reply | NoReply, key: str, value: object) -> bool:
    """Whether the server confirms that it carried out the call, which a proxy's page with a 200 does not."""
    return isinstance(reply, Reply) and reply.ok and (reply.data or {}).get(key) == value


def _why(reply: Reply | NoReply) -> str:
    return reply.reason if isinstance(reply, NoReply) else f"{reply.status}: {said(reply)}"
