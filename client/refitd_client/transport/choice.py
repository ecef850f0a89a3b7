"""Which way a version takes from a trainer's memory to engines: why one cannot work, and which is taken. Pure.

A trainer of one process has one place, and one of several ranks has a place for each. A GPU is known by its UUID. Bus
ids are no names: some hosts give two GPUs one.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from refitd_client.contract.plugin import Receiver, Receivers
from refitd_client.errors import TransportRefusedError
from refitd_client.publish.ports import PublishRoute
from refitd_client.transport.script import Backend
from refitd_client.ways import Choice, Transport

FASTEST: tuple[Transport, ...] = ("handover", "nccl")
"""What `auto` tries before files, in this order, by the figures of docs/transports.md."""

_OTHERS_NAMED = 3  # engines in a sentence
_OWN_MEMORY = "the tensors are in this process's memory: put them into SharedTensors (docs/handover.md), or use gloo"
_FITS: dict[str, str] = {
    "handover": "trainer and engines share {}",
    "nccl": "trainer and engine ranks have GPUs of their own",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPlace:
    """Where the tensors of one process of the trainer are.

    `host` and `boot` name the host. `devices` are the UUIDs of the GPUs that hold tensors, empty for host memory;
    `shared`: that host memory can be opened by other processes. `backends` are those of this process's torch.
    `is_rank`: it is one of several ranks, which copy what cannot be opened or sent as it lies.
    """

    host: str
    boot: str
    devices: frozenset[str]
    shared: bool
    backends: frozenset[str]
    is_rank: bool = False

    def is_host_of(self, receiver: Receiver) -> bool:
        """Whether a rank runs on the same host, in a container of the same name."""
        return (receiver.host, receiver.boot) == (self.host, self.boot)


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Whom a version is sent to: the `receivers` by name, through `backend`; `service_host` is the service's. `needs`
    are the digests of what receivers need that do not need everything.
    """

    backend: Backend
    receivers: tuple[str, ...]
    service_host: str
    needs: Mapping[str, str] = field(default_factory=dict[str, str])


_EVERYWHERE = Choice(transport="disk", why="files go everywhere")


def decide_route(
    transport: Transport, places: Sequence[TrainerPlace], found: Receivers, service_host: str
) -> PublishRoute:
    """Decide how a publication goes, where it is known who can receive.

    Args:
        service_host: the service's, which the trainer's host is reached by.

    Raises:
        TransportRefusedError: what is asked for cannot work between this trainer and these engines.
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


def choose(places: Sequence[TrainerPlace], found: Receivers) -> Choice:
    """The fastest transport that reaches all engine ranks for sure, else files."""
    hindrances: list[str] = []
    for transport in FASTEST:
        if (hindrance := hinders(transport, places, found)) is None:
            where = "a GPU" if any(place.devices for place in places) else "a host"
            return Choice(transport=transport, why=_FITS[transport].format(where))
        hindrances.append(hindrance)
    no_handover, no_nccl = hindrances
    why = f"no hand-over: {no_handover}; no NCCL: {no_nccl}" if found.receivers else no_handover
    by_files: Transport = "disk" if places[0].is_rank else "delta"
    return Choice(transport=by_files, why=f"files go everywhere ({why})")


def hinders(transport: Transport, places: Sequence[TrainerPlace], found: Receivers) -> str | None:
    """Why a transport is not sure to reach all engine ranks, as a sentence that says what else to do; None if it is."""
    if transport not in {"handover", "nccl", "gloo"}:
        return None
    if not found.receivers:
        return _none_receives(found)
    if transport == "handover":
        return rules_out_handover(places, found) or _hinders_handover(places, found.receivers)
    for rank, place in enumerate(places):
        hindrance = _hinders_group(transport, place, found.receivers)
        if hindrance is not None:
            return f"trainer rank {rank}: {hindrance}" if place.is_rank else hindrance
    return _doubled(places) if transport == "nccl" else None


def rules_out_handover(places: Sequence[TrainerPlace], found: Receivers) -> str | None:
    """Why a hand-over would bring nothing but files, as a sentence; None where some engine may take it."""
    first, receivers = places[0], found.receivers
    if not receivers:
        return _none_receives(found)
    for rank, place in enumerate(places):
        if (place.host, place.boot) != (first.host, first.boot):
            return f"trainer rank {rank} is on {place.host}, and rank 0 on {first.host}: use nccl or gloo"
    if not any(first.is_host_of(each) for each in receivers):
        return _far(receivers[0], first)
    return None if first.devices or first.shared or first.is_rank else _OWN_MEMORY


def _hinders_handover(places: Sequence[TrainerPlace], receivers: Sequence[Receiver]) -> str | None:
    first = places[0]
    if (far := next((each for each in receivers if not first.is_host_of(each)), None)) is not None:
        return _far(far, first)
    devices = {device for place in places for device in place.devices}
    if not devices:
        return None if first.shared else "the tensors are in host memory"
    other = next((each for each in receivers if each.device not in devices), None)
    if other is not None:
        return f"rank {other.rank} of {other.engine} is on {other.device or 'no GPU'}, and the tensors are not there"
    return None


def _far(receiver: Receiver, trainer: TrainerPlace) -> str:
    runs = f"rank {receiver.rank} of {receiver.engine} runs on {receiver.host}"
    return f"{runs}, and the trainer on {trainer.host}: use nccl or gloo"


def _none_receives(found: Receivers) -> str:
    others = found.others
    if not others:
        return (
            "no engine of the service follows the run yet: one that follows no run does so from the first version on, "
            "and of one that follows another 'refitd explain RUN' says how to bring it here"
        )
    more = len(others) - _OTHERS_NAMED
    names = ", ".join(others[:_OTHERS_NAMED]) + (f" and {more} more" if more > 0 else "")
    return f"no engine of the run ({names}) has refitd inside: install it there (docs/plugin.md)"


def _hinders_group(backend: str, trainer: TrainerPlace, receivers: Sequence[Receiver]) -> str | None:
    """Why one process of the trainer cannot be in a group with all engine ranks; None where it can."""
    other = "use gloo, or auto" if backend == "nccl" else "use auto"
    if backend not in trainer.backends:
        return f"the trainer's torch has no {backend}: {other}"
    lacks = next((each for each in receivers if backend not in each.backends), None)
    if lacks is not None:
        return f"rank {lacks.rank} of {lacks.engine} has no {backend}: {other}"
    if backend != "nccl":
        return None
    if not trainer.devices:
        return "the tensors are in host memory: use gloo"
    if len(trainer.devices) > 1:
        return f"the tensors are on {len(trainer.devices)} GPUs, and one sends"
    both = next((each for each in receivers if each.device in trainer.devices), None)
    if both is not None:
        return (
            f"trainer and rank {both.rank} of {both.engine} share {both.device}: NCCL refuses two ranks on one GPU; "
            "use handover"
        )
    twice = _twice(each.device for each in receivers)
    return None if twice is None else f"two engine ranks share {twice}: NCCL refuses two ranks on one GPU; use disk"


def _doubled(places: Sequence[TrainerPlace]) -> str | None:
    twice = _twice(device for place in places for device in place.devices)
    return None if twice is None else f"two trainer ranks share {twice}: NCCL refuses two ranks on one GPU; use gloo"


def _twice(devices: Iterable[str]) -> str | None:
    return next((device for device, count in Counter(devices).items() if count > 1), None)
