"""How one publication reaches the engines: what `transport` asks for, held against what is there."""

import logging
from dataclasses import replace
from typing import Any

from refitd_client.errors import TransportRefusedError
from refitd_client.http.publisher_client import ReceiversQuery
from refitd_client.publish.options import ALL, DurabilityPolicy
from refitd_client.publish.ports import MemoryWay, PublishRoute
from refitd_client.ways import BY_FILES, Choice, Transport

_NO_MEMORY = "this installation of refitd brings no version from a trainer's memory"
_log = logging.getLogger("refitd_client")


def route_of(
    transport: Transport,
    weights: Any,
    memory: MemoryWay | None,
    receivers: ReceiversQuery | None,
    durable: DurabilityPolicy = ALL,
) -> PublishRoute:
    """Decide how a publication goes.

    Args:
        memory: None in a tree without the ring.
        receivers: asks the service who can receive; None where there is none to ask.

    Raises:
        TransportRefusedError: what is asked for cannot work between this trainer and these engines.
        ValueError: there is no service to ask.
    """
    if transport in BY_FILES:
        return PublishRoute(choice=Choice(transport=transport, why="the trainer asks for it"))
    if receivers is None:
        raise ValueError(f"transport={transport!r} needs the service_url of the service that has the engines")
    if memory is None:
        if transport != "auto":
            raise TransportRefusedError(f"transport={transport!r} cannot work: {_NO_MEMORY}")
        return PublishRoute(choice=Choice(transport="delta", why=f"files go everywhere ({_NO_MEMORY})"))
    route = memory.route(transport, weights, receivers)
    if route.instead != receivers.connection.reach.told:
        receivers.connection.reach.told = route.instead
        if route.instead is not None:  # once, and again when it changes: a step would say what the one before has said
            _log.warning("the version goes by its files: %s", route.instead)
    if route.handover or route.instead is not None or durable.is_always:
        return route
    return replace(route, instead=f"all versions get files, whatever durable={durable.text!r} says: {route.choice.why}")
