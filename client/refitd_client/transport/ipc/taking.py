"""The tensors of an offer, as an engine sees them: views of another process's memory, nothing copied yet."""

from collections.abc import Mapping
from typing import Any

from refitd_client.transport.ipc.device import DeviceMemory
from refitd_client.transport.ipc.offer import (
    Allocation,
    DevicePlace,
    HostPlace,
    Layout,
    Offer,
    OfferedTensor,
    OfferRefusedError,
)
from refitd_client.transport.ipc.shared import HostMemory
from refitd_client.transport.ipc.whereabouts import boot_id, host_name


class Taker:
    """What one engine has opened. Kept from one offer to the next: a trainer's memory stays where it is."""

    def __init__(self) -> None:
        self._host, self._device = HostMemory(), DeviceMemory()

    def begin(self, layout: Layout) -> None:
        """Give back what this layout does not name. Nothing is opened yet.

        Raises:
            OfferRefusedError: it is of another host, or of before a boot.
        """
        if (layout.host, layout.boot) != (host_name(), boot_id()):
            raise OfferRefusedError(f"the offer is of host {layout.host[:100]!a}, and this is {host_name()}")
        self.keep(layout)

    def tensors(self, offer: Offer) -> dict[str, Any]:
        """The tensors by name, in the offer's order. They are what was offered as long as its lock is held.

        Raises:
            OfferRefusedError: as `begin`. OSError, ValueError, DriverError: as `tensor`.
        """
        self.begin(offer.layout)
        return {each.name: self.tensor(each) for each in offer.layout.tensors}

    def tensor(self, tensor: OfferedTensor) -> Any:
        """A view of one tensor of a layout that was begun.

        Raises:
            OSError, ValueError, DriverError: the memory is not there, or not as the offer says.
        """
        return self._open(tensor.place, tensor.dtype, tensor.shape)

    def addresses(self, ends: Mapping[Allocation, int], device: int) -> dict[Allocation, int]:
        """Where allocations of a layout that was begun are seen by a GPU of this process. `ends` says how many bytes of
        each its tensors use.

        Raises:
            DriverError: as `tensor`.
        """
        return self._device.addresses(ends, device)

    def keep(self, layout: Layout | None) -> None:
        """Give back what this layout does not name, all where there is none. Nothing may read there any more."""
        places = [] if layout is None else [tensor.place for tensor in layout.tensors]
        self._host.keep({place.path for place in places if isinstance(place, HostPlace)})
        self._device.keep({place.allocation for place in places if isinstance(place, DevicePlace)})

    def _open(self, place: HostPlace | DevicePlace, dtype: str, shape: tuple[int, ...]) -> Any:
        match place:
            case HostPlace():
                return self._host.tensor(place, dtype, shape)
            case DevicePlace():
                return self._device.tensor(place, dtype, shape)
