"""The tensors of an offer, as an engine sees them: views of another process's memory, nothing copied yet."""

from collections.abc import Mapping
from typing import Any

from refitd_client.transport.ipc.device import DeviceMemory
from refitd_client.transport.ipc.offer import (
    Allocation,
    DevicePlace,
    HostPlace,
    Offer,
    OfferedTensor,
    OfferLayout,
    OfferRefusedError,
)
from refitd_client.transport.ipc.shared import HostMemory, boot_id, host_name


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
        places = [] if layout is None else [tensor.place for tensor in layout.tensors]
        self._host.keep({place.path for place in places if isinstance(place, HostPlace)})
        self._device.keep({place.allocation for place in places if isinstance(place, DevicePlace)})
