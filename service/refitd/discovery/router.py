"""Asking an sglang-router for its workers. It has no routes for weights, so each worker is spoken to by itself."""

import re

import msgspec

from refitd.discovery.memory import Answer, Named, Silent
from refitd.discovery.place import Router
from refitd.engine.address import AddressRefusedError, check_url
from refitd.engine.http import NoReply, Transport

SECONDS = 5.0
_RANK = re.compile(r"@\d+$")  # a router that knows data-parallel ranks names one engine once for each


class _Worker(msgspec.Struct):
    url: str


class _Workers(msgspec.Struct):
    workers: list[_Worker]


async def ask_router(place: Router) -> Answer:
    """The workers that it lists, healthy or not: what an engine can do now is seen when it is asked itself."""
    reply = await Transport(place.url, api_key=place.key_file, admin_key=None).get("/workers", SECONDS)
    if isinstance(reply, NoReply):
        return Silent(place.url, reply.reason)
    if not reply.ok:
        return Silent(place.url, f"/workers answered {reply.status}: is it an sglang-router?")
    try:
        listed = msgspec.convert(reply.data, _Workers).workers
        return Named(place.url, frozenset(check_url(_RANK.sub("", worker.url)) for worker in listed))
    except (msgspec.ValidationError, AddressRefusedError) as error:
        return Silent(place.url, f"/workers says what cannot be used: {error}")
