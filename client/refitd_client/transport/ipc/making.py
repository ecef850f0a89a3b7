"""An offer of a trainer's tensors: where each lies and what it holds, for a process on this host."""

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from refitd_client.checkpoint.finite import NO_RULE, Rule
from refitd_client.fingerprint import Look, Scan, begin_scan
from refitd_client.tensors.source import DTYPES
from refitd_client.transport.ipc import device, shared
from refitd_client.transport.ipc.offer import DevicePlace, HostPlace, Layout, Offer, OfferedTensor, offer_with
from refitd_client.transport.ipc.whereabouts import boot_id, host_name

if TYPE_CHECKING:
    from refitd_client.fingerprint.placed import Placed

Where = tuple[tuple[str, int, Any, Any], ...]
"""Name, address, dtype and shape of each tensor."""


@dataclass(frozen=True, slots=True)
class _Known:
    """`memories` are the memories that the tensors lie in, by the address of one of them."""

    where: Where
    layout: Layout
    line: bytes
    memories: Mapping[int, int | str]


@dataclass(frozen=True, slots=True)
class Looked:
    """Tensors that are about to be offered. `scan` waits for what is found out about them where they lie."""

    scan: Callable[[], list[Scan]]
    _known: _Known

    def offer(self, version: str, fingerprints: Sequence[int]) -> Offer:
        """Offer them as a version."""
        return offer_with(self._known.layout, version, fingerprints, self._known.line)


class Layouts:
    """The layout of the tensors that were offered last: made anew only when one of them has gone elsewhere."""

    def __init__(self) -> None:
        self._known: _Known | None = None
        self._placed: tuple[_Known, Placed | None] | None = None

    def look(self, tensors: Mapping[str, Any], rules: Sequence[Rule]) -> Looked:
        """Describe tensors, all contiguous, as they are published, and begin to look at them. `rules` are those for NaN
        and infinity, the same at each step. It must have scanned before the tensors change.

        Raises:
            DriverError, NotSharedError: the memory of one cannot be exported.
        """
        known = self._where(tensors)
        return Looked(self._begin_scan(known, tensors, rules), known)

    def _where(self, tensors: Mapping[str, Any]) -> _Known:
        """An address says nothing alone: memory is given back, and another is at its place."""
        where, known = where_of(tensors), self._known
        if known is None or known.where != where or any(_memory_at(at, it) != it for at, it in known.memories.items()):
            known = self._known = _look(tensors, where)
        return known

    def _begin_scan(self, known: _Known, tensors: Mapping[str, Any], rules: Sequence[Rule]) -> Callable[[], list[Scan]]:
        from refitd_client.fingerprint.placed import Placed

        looks = [Look(tensor, rule, True) for tensor, rule in zip(tensors.values(), rules, strict=True)]
        if self._placed is None or self._placed[0] is not known:
            self._placed = known, Placed.of(looks)
        placed = self._placed[1]
        return begin_scan(looks) if placed is None else placed.begin()


def where_of(tensors: Mapping[str, Any]) -> Where:
    """What is equal as long as tensors stay where they are, or others lie at exactly their places."""
    return tuple((name, tensor.data_ptr(), tensor.dtype, tensor.shape) for name, tensor in tensors.items())


def offer_of(version: str, tensors: Mapping[str, Any]) -> Offer:
    """One offer alone. Fingerprints are computed where the tensors are; this waits for them.

    Raises:
        DriverError, NotSharedError: the memory of one cannot be exported.
    """
    looked = Layouts().look(tensors, [NO_RULE] * len(tensors))
    return looked.offer(version, [each.fingerprint for each in looked.scan()])


def _look(tensors: Mapping[str, Any], where: Where) -> _Known:
    places = {name: _place_of(tensor) for name, tensor in tensors.items()}
    offered = (
        OfferedTensor(name, DTYPES[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape), places[name])
        for name, tensor in tensors.items()
    )
    layout = Layout(host=host_name(), boot=boot_id(), pid=os.getpid(), life=_Life.drawn, tensors=tuple(offered))
    first: dict[int | str, int] = {}
    for name, address, _, _ in where:
        if tensors[name].nbytes:
            first.setdefault(_memory_of(places[name]), address)
    return _Known(where, layout, msgspec.json.encode(layout), {at: memory for memory, at in first.items()})


def _place_of(tensor: Any) -> HostPlace | DevicePlace:
    return device.place_of(tensor) if tensor.device.type == "cuda" else shared.place_of(tensor)


def _memory_of(place: HostPlace | DevicePlace) -> int | str:
    return place.path if isinstance(place, HostPlace) else place.serial


def _memory_at(address: int, known: int | str) -> int | str | None:
    """The memory of the same kind that is there now: a file, by its path, or an allocation, by its number."""
    return shared.path_at(address) if isinstance(known, str) else device.serial_at(address)


class _Life:
    """What no other process has, not even one with this one's number in another container."""

    drawn = secrets.token_hex(8)

    @classmethod
    def draw(cls) -> None:
        cls.drawn = secrets.token_hex(8)


os.register_at_fork(after_in_child=_Life.draw)
