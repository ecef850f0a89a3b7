"""Asking one place for engines, whichever kind of place it is."""

from typing import assert_never

from refitd.discovery.areal import ask_areal
from refitd.discovery.dns import ask_dns
from refitd.discovery.memory import Answer
from refitd.discovery.place import Areal, Dns, Place, Router
from refitd.discovery.router import ask_router
from refitd.root.threads import RootThreads


async def ask(place: Place, threads: RootThreads) -> Answer:
    """What it says now. `threads` are for places that are files."""
    match place:
        case Dns():
            return await ask_dns(place)
        case Router():
            return await ask_router(place)
        case Areal():
            return await ask_areal(place, threads)
        case _:
            assert_never(place)
