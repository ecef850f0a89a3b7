"""How one publication reaches the engines: what `transport` asks for, held against what is there."""

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast
from urllib.parse import urlsplit

from refitd_client.contract.plugin import Receivers
from refitd_client.errors import ServiceError, TransportRefusedError
from refitd_client.http.publisher_client import ReceiversQuery
from refitd_client.publish.options import ALL, DurabilityPolicy
from refitd_client.transport.device import uuid_of
from refitd_client.transport.memory import boot_id, host_name
from refitd_client.transport.sending import Destination, available, is_sharable
from refitd_client.ways import (
    BY_FILES,
    Choice,
    TrainerPlace,
    Transport,
    choose,
    hinders,
    rules_out_handover,
)
from refitd_client.write.content import Content, WeightsOfRanks

_EVERYWHERE = Choice(transport="disk", why="files go everywhere")
_log = logging.getLogger("refitd_client")
_REASON = 500  # characters of a reason in a manifest: it may quote an error


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishRoute:
    """The way that a publication takes, and to which ranks it sends.

    `choice` is the transport with the reason for it. `instead` says why the files go alone where more was asked for.
    """

    choice: Choice
    destination: Destination | None = None
    instead: str | None = None

    @property
    def handover(self) -> bool:
        """Whether engines take it from the trainer's memory, before its files are written."""
        return self.choice.transport not in BY_FILES

    @property
    def metadata(self) -> dict[str, str]:
        """What the version's metadata says of it."""
        return {"transport": self.choice.transport, "transport_why": (self.instead or self.choice.why)[:_REASON]}


def route_of(
    transport: Transport, weights: Any, receivers: ReceiversQuery | None, durable: DurabilityPolicy = ALL
) -> PublishRoute:
    """Decide how a publication goes.

    Args:
        receivers: asks the service who can receive; None where there is none to ask.

    Raises:
        TransportRefusedError: what is asked for cannot work between this trainer and these engines.
        ValueError: there is no service to ask.
    """
    if transport in BY_FILES:
        return PublishRoute(choice=Choice(transport=transport, why="the trainer asks for it"))
    route = _by_what_is_there(transport, weights, receivers)
    if receivers is not None and route.instead != receivers.connection.reach.told:
        receivers.connection.reach.told = route.instead
        if route.instead is not None:  # once, and again when it changes: a step would say what the one before has said
            _log.warning("the version goes by its files: %s", route.instead)
    if route.handover or route.instead is not None or durable.is_always:
        return route
    return replace(route, instead=f"all versions get files, whatever durable={durable.text!r} says: {route.choice.why}")


def _by_what_is_there(transport: Transport, weights: Any, receivers: ReceiversQuery | None) -> PublishRoute:
    if receivers is None:
        raise ValueError(f"transport={transport!r} needs the service_url of the service that has the engines")
    places = _places_of(weights)
    if places is None:
        asked = None if transport == "auto" else f"transport={transport!r} takes tensors, and the weights are files"
        return PublishRoute(choice=Choice(transport="disk", why="the weights are files"), instead=asked)
    try:
        found = receivers.ask()
    except (ServiceError, OSError, ValueError) as error:
        by: Transport = "delta" if transport == "auto" and not places[0].is_rank else "disk"
        choice = Choice(transport=by, why="files need no answer of the service")
        return PublishRoute(choice=choice, instead=f"the service does not say who can receive: {error}")
    return decide_route(transport, places, found, urlsplit(receivers.connection.url).hostname or "")


def decide_route(
    transport: Transport, places: Sequence[TrainerPlace], found: Receivers, service_host: str
) -> PublishRoute:
    """The same where it is known who can receive. Pure.

    Raises:
        TransportRefusedError: as `route_of`.
    """
    choice = Choice(transport=transport, why="the trainer asks for it")
    if transport == "auto":
        choice = choose(places, found)
    if transport in {"nccl", "gloo"} and (hindrance := hinders(transport, places, found)) is not None:
        if found.receivers:
            raise TransportRefusedError(f"transport={transport!r} cannot work: {hindrance}")
        return PublishRoute(choice=_EVERYWHERE, instead=hindrance)
    if transport == "handover" and (nothing := rules_out_handover(places, found)) is not None:
        return PublishRoute(choice=_EVERYWHERE, instead=nothing)
    match choice.transport:
        case "nccl" | "gloo" as backend:
            destination = Destination(
                backend=backend,
                receivers=tuple(sorted(each.name for each in found.receivers)),
                service_host=service_host,
                needs={each.name: each.needs for each in found.receivers if each.needs and places[0].is_rank},
            )
            return PublishRoute(choice=choice, destination=destination)
        case _:
            return PublishRoute(choice=choice)


def place_of_process(tensors: Sequence[Any], *, count: int, is_rank: bool = False) -> TrainerPlace:
    """Where a process has its tensors.

    Args:
        count: how many it publishes, of torch and others.
    """
    return TrainerPlace(
        host=host_name(),
        boot=boot_id(),
        devices=frozenset(uuid_of(device) for device in {each.device for each in tensors} if device.type == "cuda"),
        shared=not is_rank and 0 < len(tensors) == count and all(is_sharable(each) for each in tensors),
        backends=available() if tensors or is_rank else frozenset(),
        is_rank=is_rank,
    )


def _places_of(weights: Any) -> Sequence[TrainerPlace] | None:
    """Where the tensors are, before names and dtypes are worked out; None for a folder."""
    if isinstance(weights, Content):
        return weights.weights.places if isinstance(weights.weights, WeightsOfRanks) else None
    if isinstance(weights, (str, os.PathLike)):
        return None
    tensors = cast("Mapping[str, Any]", weights) if isinstance(weights, Mapping) else dict(weights.named_parameters())
    torch = sys.modules.get("torch")
    mine = [each for each in tensors.values() if torch is not None and isinstance(each, torch.Tensor)]
    return [place_of_process(mine, count=len(tensors))]
