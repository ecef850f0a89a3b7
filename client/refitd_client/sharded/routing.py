"""How a version of several ranks reaches the engines: what `transport` asks for, held against where all of them are."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from refitd_client.contract.receivers import Receivers
from refitd_client.errors import ServiceError, TransportRefusedError
from refitd_client.http.connection import Connection
from refitd_client.http.publisher_client import ReceiversQuery
from refitd_client.publish.route import PublishRoute
from refitd_client.sharded.holdings import Holding
from refitd_client.transport.group.choice import TRANSPORTS, Choice, TrainerPlace, Transport, hinders
from refitd_client.transport.group.host import available
from refitd_client.transport.group.sending import Destination
from refitd_client.transport.ipc.device import uuid_of
from refitd_client.transport.ipc.shared import boot_id, host_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What all ranks ask for, and where each of them has its tensors, by rank."""

    transport: Transport
    places: Sequence[TrainerPlace]


def place_of_rank(holdings: Mapping[str, Holding]) -> TrainerPlace:
    """Where this rank's tensors are. They are copied before they are sent, so that any host memory will do."""
    devices = {each.tensor.device for each in holdings.values() if each.tensor.numel()}
    return TrainerPlace(
        host=host_name(),
        boot=boot_id(),
        devices=frozenset(uuid_of(each) for each in devices if each.type == "cuda"),
        shared=False,
        backends=available(),
    )


def transport_of(transport: Any, connection: Connection | None, *, handover: bool = False) -> Transport | None:
    """Check a caller's word.

    Args:
        transport: the transport, None for files without more.
        connection: where the service is.
        handover: the caller asks for a hand-over instead.

    Raises:
        ValueError: it is none, or two of them, or there is no service to ask.
    """
    if handover and transport is not None:
        raise ValueError("handover=True is transport='handover': pass one of the two")
    transport = "handover" if handover else transport
    if transport is None:
        return None
    if transport not in TRANSPORTS:
        raise ValueError(f"transport is {transport!r}: it is one of {', '.join(TRANSPORTS)}")
    if transport not in {"disk", "delta"} and connection is None:
        raise ValueError(f"transport={transport!r} needs the service_url of the service that has the engines")
    return transport


def check_delta(delta: Any, transport: Any) -> None:
    """Check a caller's word.

    Raises:
        ValueError: it is none, or `transport` says it.
    """
    if delta not in {"auto", "never"}:
        raise ValueError(f"delta is {delta!r}: it is 'auto' or 'never'")
    if delta != "never" and transport is not None:
        raise ValueError("transport goes without delta: it says what that would")


def route_of_ranks(asked: Asked, receivers: ReceiversQuery | None) -> PublishRoute:
    """Decide how a publication goes. Rank 0 decides for all.

    Args:
        asked: what the ranks ask for.
        receivers: asks the service who can receive; None where there is none to ask.

    Raises:
        TransportRefusedError: what is asked for cannot work between these ranks and these engines.
    """
    if asked.transport == "delta":
        return PublishRoute(choice=Choice(transport="delta", why="the trainer asks for it"), delta="auto")
    if asked.transport == "disk" or receivers is None:
        return _by_files("the trainer asks for it")
    try:
        found = receivers.ask()
    except (ServiceError, OSError, ValueError) as error:
        return _by_files("files need no answer of the service", f"the service does not say who can receive: {error}")
    return decide_route(asked, found, urlsplit(receivers.connection.url).hostname or "")


def decide_route(asked: Asked, found: Receivers, service_host: str) -> PublishRoute:
    """The same where it is known who can receive. Pure.

    Args:
        asked: what the ranks ask for.
        found: what can receive, as the service says.
        service_host: the service's host.

    Raises:
        TransportRefusedError: as `route_of_ranks`.
    """
    receivers = found.receivers
    names = tuple(sorted(each.name for each in receivers))
    needs = {each.name: each.needs for each in receivers if each.needs}
    if asked.transport == "handover":
        if (hindrance := hinders_lending(asked.places, found)) is not None:
            return _by_files("files go everywhere", hindrance)
        return _lent("the trainer asks for it")
    if asked.transport == "auto":
        if _share_gpus(asked.places, found):
            return _lent("trainer and engines share GPUs")
        if (hindrance := hinders_ranks("nccl", asked.places, found)) is not None:
            return _by_files(f"files go everywhere (no NCCL: {hindrance})")
        choice = Choice(transport="nccl", why="trainer and engine ranks have GPUs of their own")
        to = Destination(backend="nccl", receivers=names, service_host=service_host, needs=needs)
        return _to_group(choice, to)
    backend = "nccl" if asked.transport == "nccl" else "gloo"
    if (hindrance := hinders_ranks(backend, asked.places, found)) is not None:
        if not receivers:
            return _by_files("files go everywhere", hindrance)
        raise TransportRefusedError(f"transport={asked.transport!r} cannot work: {hindrance}")
    choice = Choice(transport=backend, why="the trainer asks for it")
    to = Destination(backend=backend, receivers=names, service_host=service_host, needs=needs)
    return _to_group(choice, to)


def hinders_ranks(backend: Transport, places: Sequence[TrainerPlace], found: Receivers) -> str | None:
    """Why `nccl` or `gloo` cannot work between all these, as a sentence that says what else to do; None where it can.

    Args:
        backend: the transport.
        places: where each rank's tensors are, by rank.
        found: as in `decide_route`.
    """
    for rank, place in enumerate(places):
        if (hindrance := hinders(backend, place, found)) is not None:
            return f"trainer rank {rank}: {hindrance}" if found.receivers else hindrance
    if backend != "nccl":
        return None
    counts = Counter(device for place in places for device in place.devices)
    twice = next((device for device, count in counts.items() if count > 1), None)
    return None if twice is None else f"two trainer ranks share {twice}: NCCL refuses two ranks on one GPU; use gloo"


def hinders_lending(places: Sequence[TrainerPlace], found: Receivers) -> str | None:
    """Why engines cannot copy from the memory of these ranks, as a sentence; None where that may work.

    Args:
        places: where each rank's tensors are, by rank.
        found: as in `decide_route`.
    """
    first, receivers = places[0], found.receivers
    if not receivers:
        return hinders("handover", first, found)
    for rank, place in enumerate(places):
        if (place.host, place.boot) != (first.host, first.boot):
            return f"trainer rank {rank} is on {place.host}, and rank 0 on {first.host}: use nccl or gloo"
    if not any(first.is_host_of(each) for each in receivers):
        far = receivers[0]
        return f"rank {far.rank} of {far.engine} runs on {far.host}, and the trainer on {first.host}: use nccl or gloo"
    return None


def _share_gpus(places: Sequence[TrainerPlace], found: Receivers) -> bool:
    """Whether all engine ranks are on GPUs of the trainer's ranks."""
    devices = {device for place in places for device in place.devices}
    all_here = all(each.device in devices and places[0].is_host_of(each) for each in found.receivers)
    return bool(found.receivers) and all_here and hinders_lending(places, found) is None


def _lent(why: str) -> PublishRoute:
    return PublishRoute(choice=Choice(transport="handover", why=why), handover=True)


def _to_group(choice: Choice, destination: Destination) -> PublishRoute:
    return PublishRoute(choice=choice, handover=True, destination=destination)


def _by_files(why: str, instead: str | None = None) -> PublishRoute:
    return PublishRoute(choice=Choice(transport="disk", why=why), instead=instead)
