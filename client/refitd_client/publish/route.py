"""How one publication reaches the engines: what `transport` asks for, held against what is there."""

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, cast, runtime_checkable
from urllib.parse import urlsplit

from refitd_client.contract.receivers import Receiver, Receivers
from refitd_client.errors import ServiceError, TransportRefusedError
from refitd_client.http.publisher_client import ReceiversQuery
from refitd_client.publish.durability import ALL, DurabilityPolicy
from refitd_client.transport.group.choice import (
    TRANSPORTS,
    Choice,
    TrainerPlace,
    Transport,
    choose,
    hinders,
    why_files_alone,
)
from refitd_client.transport.group.host import available
from refitd_client.transport.group.sending import Destination, is_sharable
from refitd_client.transport.ipc.device import uuid_of
from refitd_client.transport.ipc.shared import boot_id, host_name
from refitd_client.write.content import Content

_EVERYWHERE = Choice(transport="disk", why="files go everywhere")
_log = logging.getLogger("refitd_client")
_REASON = 500  # characters of a reason in a manifest: it may quote an error


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishRoute:
    """What a publication does: hand over or not, as a delta or not, and to which ranks it sends.

    `choice` is the transport with the reason for it. `instead` says why the files go alone where more was asked for.
    """

    choice: Choice
    delta: Literal["auto", "never"] = "never"
    handover: bool = False
    destination: Destination | None = None
    instead: str | None = None

    @property
    def metadata(self) -> dict[str, str]:
        """What the version's metadata says of it."""
        return {"transport": self.choice.transport, "transport_why": (self.instead or self.choice.why)[:_REASON]}


@runtime_checkable
class RoutedWeights(Protocol):
    """Weights of which it was decided before how they go: those of several ranks (`sharded/`)."""

    @property
    def route(self) -> PublishRoute | None:
        """How they go."""
        ...


def route_of(
    transport: Transport, weights: Any, receivers: ReceiversQuery | None, durable: DurabilityPolicy = ALL
) -> PublishRoute:
    """Decide how a publication goes.

    Args:
        transport: what the trainer asks for; `auto` leaves it to this function.
        weights: a state dict, a module, or the path of a folder.
        receivers: asks the service who can receive; None where there is none to ask.
        durable: which versions get files.

    Raises:
        TransportRefusedError: what is asked for cannot work between this trainer and these engines.
        ValueError: `transport` is none, or there is no service to ask.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport is {transport!r}: it is one of {', '.join(TRANSPORTS)}")
    if (
        isinstance(weights, Content)
        and isinstance(shared := weights.weights, RoutedWeights)
        and shared.route is not None
    ):
        return shared.route
    if transport in {"disk", "delta"}:
        return _by_files(Choice(transport=transport, why="the trainer asks for it"))
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
    tensors = _tensors_of(weights)
    if tensors is None:
        asked = None if transport == "auto" else f"transport={transport!r} takes tensors, and the weights are files"
        return _by_files(Choice(transport="disk", why="the weights are files"), instead=asked)
    try:
        found = receivers.ask()
    except (ServiceError, OSError, ValueError) as error:
        asked = Choice(transport="delta" if transport == "auto" else "disk", why="files need no answer of the service")
        return _by_files(asked, instead=f"the service does not say who can receive: {error}")
    trainer, service_host = _trainer_of(tensors), urlsplit(receivers.connection.url).hostname or ""
    return _route(transport, trainer, found, service_host)


def _route(transport: Transport, trainer: TrainerPlace, found: Receivers, service_host: str) -> PublishRoute:
    receivers = found.receivers
    if transport == "auto":
        choice = choose(trainer, found)
    else:
        choice = Choice(transport=transport, why="the trainer asks for it")
        hindrance = hinders(transport, trainer, found)
        if hindrance is not None and transport in {"nccl", "gloo"}:
            if receivers:
                raise TransportRefusedError(f"transport={transport!r} cannot work: {hindrance}")
            return _by_files(_EVERYWHERE, instead=hindrance)
        if transport == "handover" and (nothing := why_files_alone(trainer, found)) is not None:
            return _by_files(_EVERYWHERE, instead=nothing)
    match choice.transport:
        case "nccl" | "gloo" as backend:
            destination = Destination(backend=backend, receivers=_names(receivers), service_host=service_host)
            return PublishRoute(choice=choice, handover=True, destination=destination)
        case "handover":
            return PublishRoute(choice=choice, handover=True)
        case _:
            return _by_files(choice)


def _by_files(choice: Choice, *, instead: str | None = None) -> PublishRoute:
    return PublishRoute(choice=choice, delta="auto" if choice.transport == "delta" else "never", instead=instead)


def _names(receivers: list[Receiver]) -> tuple[str, ...]:
    return tuple(sorted(each.name for each in receivers))


def _tensors_of(weights: Any) -> Mapping[str, Any] | None:
    """The tensors, as they are before names and dtypes are worked out; None for a folder."""
    if isinstance(weights, (str, os.PathLike)):
        return None
    if isinstance(weights, Mapping):
        return cast("Mapping[str, Any]", weights)
    return dict(weights.named_parameters())


def _trainer_of(tensors: Mapping[str, Any]) -> TrainerPlace:
    torch = sys.modules.get("torch")
    mine = [each for each in tensors.values() if torch is not None and isinstance(each, torch.Tensor)]
    on_gpus = {uuid_of(each.device) for each in mine if each.device.type == "cuda"}
    return TrainerPlace(
        host=host_name(),
        boot=boot_id(),
        devices=frozenset(on_gpus),
        shared=bool(mine) and len(mine) == len(tensors) and all(is_sharable(each) for each in mine),
        backends=available() if mine else frozenset(),
    )
