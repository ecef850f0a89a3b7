"""The tensors of an offer, as an engine sees them: views of another process's memory, nothing copied yet."""

from typing import Any

from refitd_client.handover.device import DeviceMemory
from refitd_client.handover.offer import DevicePlace, HostPlace, Offer, OfferedTensor, OfferRefusedError
from refitd_client.handover.shared import HostMemory
from refitd_client.handover.whereabouts import boot_id, host_name


class Taker:
    """What one engine has opened. Kept from one offer to the next: a trainer's memory stays where it is."""

    def __init__(self) -> None:
        self._host, self._device = HostMemory(), DeviceMemory()

    def begin(self, offer: Offer) -> None:
        """Give back what this offer does not name. Nothing is opened yet.

        Raises:
            OfferRefusedError: it is of another host, or of before a boot.
        """
        if (offer.host, offer.boot) != (host_name(), boot_id()):
            raise OfferRefusedError(f"the offer is of host {offer.host[:100]!a}, and this is {host_name()}")
        self.keep(offer)

    def tensors(self, offer: Offer) -> dict[str, Any]:
        """The tensors by name, in the offer's order. They are what was offered as long as its lock is held.

        Raises:
            OfferRefusedError: as `begin`. OSError, ValueError, DriverError: as `tensor`.
        """
        self.begin(offer)
        return {each.name: self.tensor(each) for each in offer.tensors}

    def tensor(self, tensor: OfferedTensor) -> Any:
        """A view of one tensor of an offer that was begun.

        Raises:
            OSError, ValueError, DriverError: the memory is not there, or not as the offer says.
        """
        return self._open(tensor.place, tensor.dtype, tensor.shape)

    def address(self, handle: bytes, device: int) -> int:
        """Where an allocation of an offer that was begun is seen by a GPU of this process.

        Raises:
            DriverError: as `tensor`.
        """
        return self._device.address(handle, device)

    def keep(self, offer: Offer | None) -> None:
        """Give back what this offer does not name, all where there is none. Nothing may read there any more."""
        places = [] if offer is None else [tensor.place for tensor in offer.tensors]
        self._host.keep({place.path for place in places if isinstance(place, HostPlace)})
        self._device.keep({place.handle for place in places if isinstance(place, DevicePlace)})

    def _open(self, place: HostPlace | DevicePlace, dtype: str, shape: tuple[int, ...]) -> Any:
        match place:
            case HostPlace():
                return self._host.tensor(place, dtype, shape)
            case DevicePlace():
                return self._device.tensor(place, dtype, shape)
