"""An offer of a trainer's tensors: where each lies and what it holds, for a process on this host."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from refitd_client.fingerprint import fingerprints, to_text
from refitd_client.handover import device, shared
from refitd_client.handover.offer import DevicePlace, HostPlace, Offer, OfferedTensor
from refitd_client.handover.whereabouts import boot_id, host_name
from refitd_client.tensors import DTYPES


def offer_of(version: str, tensors: Mapping[str, Any], numbers: Sequence[int] | None = None) -> Offer:
    """Describe tensors, all contiguous, as they are published. `numbers` are their fingerprints where they are known.

    Fingerprints are computed where the tensors are; this waits for them.

    Raises:
        DriverError, NotSharedError: the memory of one cannot be lent.
    """
    known = fingerprints(tensors.values()) if numbers is None else numbers
    offered = (
        OfferedTensor(
            name=name,
            dtype=DTYPES[str(tensor.dtype).removeprefix("torch.")],
            shape=tuple(tensor.shape),
            fingerprint=to_text(number),
            place=_place_of(tensor),
        )
        for (name, tensor), number in zip(tensors.items(), known, strict=True)
    )
    return Offer(version=version, host=host_name(), boot=boot_id(), pid=os.getpid(), tensors=tuple(offered))


def _place_of(tensor: Any) -> HostPlace | DevicePlace:
    return device.place_of(tensor) if tensor.device.type == "cuda" else shared.place_of(tensor)
