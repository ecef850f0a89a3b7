"""An offer of a trainer's tensors, made by the trainer, and as an engine sees it: views of the trainer's memory."""

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from refitd_client.checkpoint.finite import Rule
from refitd_client.fingerprint import Scan, ScanInput, scan
from refitd_client.tensors import DTYPES
from refitd_client.transport.ipc import device, shared
from refitd_client.transport.ipc.device import DeviceMemory
from refitd_client.transport.ipc.offer import (
    Allocation,
    DevicePlace,
    HostPlace,
    Offer,
    OfferedTensor,
    OfferLayout,
    OfferRefusedError,
    offer_with,
)
from refitd_client.transport.ipc.shared import HostMemory, boot_id, host_name

if TYPE_CHECKING:
    from refitd_client.fingerprint.batch import FixedScan


class ImportedMemory:
    """The memory that one engine has opened. Kept from one offer to the next: a trainer's tensors seldom move."""

    def __init__(self) -> None:
        self._host, self._device = HostMemory(), DeviceMemory()

    def begin(self, layout: OfferLayout) -> None:
        """Close what this layout does not name. Nothing is opened yet.

        Raises:
            OfferRefusedError: it is of another host, or from before a boot.
        """
        if (layout.host, layout.boot) != (host_name(), boot_id()):
            raise OfferRefusedError(f"the offer is of host {layout.host[:100]!a}, and this is {host_name()}")
        self.keep(layout)

    def tensors(self, offer: Offer) -> dict[str, Any]:
        """The tensors by name, in the offer's order. They are as offered while its lock is held.

        Raises:
            OfferRefusedError: as `begin`.
            OSError, ValueError, DriverError: as `tensor`.
        """
        self.begin(offer.layout)
        return {each.name: self.tensor(each) for each in offer.layout.tensors}

    def tensor(self, tensor: OfferedTensor) -> Any:
        """A view of one tensor of a layout, after `begin`.

        Raises:
            OSError, ValueError, DriverError: the memory is not there, or not as the offer says.
        """
        match tensor.place:
            case HostPlace() as place:
                return self._host.tensor(place, tensor.dtype, tensor.shape)
            case DevicePlace() as place:
                return self._device.tensor(place, tensor.dtype, tensor.shape)

    def addresses(self, ends: Mapping[Allocation, int], device: int) -> dict[Allocation, int]:
        """Where a GPU of this process sees allocations of a layout, after `begin`. `ends` are the bytes used of each.

        Raises:
            DriverError: as `tensor`.
        """
        return self._device.addresses(ends, device)

    def keep(self, layout: OfferLayout | None) -> None:
        """Close what this layout does not name, or everything. Nothing may read there any more."""
        places = [] if layout is None else [piece.place for piece in layout.pieces]
        self._host.keep({place.path for place in places if isinstance(place, HostPlace)})
        self._device.keep({place.allocation for place in places if isinstance(place, DevicePlace)})


@dataclass(frozen=True, slots=True)
class _KnownLayout:
    """A layout, and what it holds for. `where` is name, address, dtype and shape of each tensor, `line` the layout as
    JSON. `memories` are the memories that the tensors lie in (a file's path or an allocation's number), by an address.
    """

    where: tuple[tuple[str, int, Any, Any], ...]
    layout: OfferLayout
    line: bytes
    memories: Mapping[int, int | str]


@dataclass(frozen=True, slots=True)
class PreparedOffer:
    """Tensors about to be offered. `scan` computes their fingerprints where they lie, and waits for them."""

    scan: Callable[[], list[Scan]]
    _known: _KnownLayout

    @property
    def layout(self) -> OfferLayout:
        """Where they lie: the same object as before where none of them has moved."""
        return self._known.layout

    def offer(self, version: str, fingerprints: Sequence[int]) -> Offer:
        """Offer them as a version."""
        return offer_with(self._known.layout, version, fingerprints, self._known.line)


class LayoutCache:
    """The layout of the tensors that were offered last: made anew only when one of them has moved."""

    def __init__(self) -> None:
        self._known: _KnownLayout | None = None
        self._fixed: tuple[_KnownLayout, FixedScan | None] | None = None

    def prepare(self, tensors: Mapping[str, Any], rules: Sequence[Rule]) -> PreparedOffer:
        """Describe tensors, to be scanned before they change.

        Args:
            tensors: by name, all contiguous, as they are published.
            rules: their dtypes', for NaN and infinity; the same at each step.

        Raises:
            DriverError, NotSharedError: the memory of one cannot be exported.
        """
        where = tuple((name, tensor.data_ptr(), tensor.dtype, tensor.shape) for name, tensor in tensors.items())
        known = self._known
        # An address alone says nothing: memory may have been freed, and other memory be at its place.
        if known is None or known.where != where or any(_memory_at(at, it) != it for at, it in known.memories.items()):
            known = self._known = _described(tensors, where)
        inputs = [ScanInput(tensor, rule, True) for tensor, rule in zip(tensors.values(), rules, strict=True)]
        return PreparedOffer(partial(self._scan, known, inputs), known)

    def _scan(self, known: _KnownLayout, inputs: Sequence[ScanInput]) -> list[Scan]:
        from refitd_client.fingerprint.batch import FixedScan

        if self._fixed is None or self._fixed[0] is not known:
            self._fixed = known, FixedScan.of(inputs)
        fixed = self._fixed[1]
        return scan(inputs) if fixed is None else fixed.begin()()


def _described(tensors: Mapping[str, Any], where: tuple[tuple[str, int, Any, Any], ...]) -> _KnownLayout:
    offered: list[OfferedTensor] = []
    addresses: dict[int | str, int] = {}  # one for each memory
    for (name, address, _, _), tensor in zip(where, tensors.values(), strict=True):
        place = device.place_of(tensor) if tensor.device.type == "cuda" else shared.place_of(tensor)
        dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")]
        offered.append(OfferedTensor(name, dtype, tuple(tensor.shape), place))
        if tensor.nbytes:
            addresses.setdefault(place.path if isinstance(place, HostPlace) else place.serial, address)
    layout = OfferLayout(host=host_name(), boot=boot_id(), pid=os.getpid(), life=process_life(), tensors=tuple(offered))
    memories = {address: memory for memory, address in addresses.items()}
    return _KnownLayout(where, layout, msgspec.json.encode(layout), memories)


def _memory_at(address: int, known: int | str) -> int | str | None:
    """The memory of the same kind that is there now: a file, by its path, or an allocation, by its number."""
    return shared.path_at(address) if isinstance(known, str) else device.serial_at(address)


class _ProcessLife:
    """A random text that no other process has, not even one with this one's pid in another container."""

    drawn = secrets.token_hex(8)

    @classmethod
    def draw(cls) -> None:
        cls.drawn = secrets.token_hex(8)


def process_life() -> str:
    """That text, of this process."""
    return _ProcessLife.drawn


os.register_at_fork(after_in_child=_ProcessLife.draw)
