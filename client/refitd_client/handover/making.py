"""An offer of a trainer's tensors: where each lies and what it holds, for a process on this host."""

import os
from collections.abc import Mapping
from typing import Any

from refitd_client.fingerprint import fingerprints, to_text
from refitd_client.handover import device
from refitd_client.handover.offer import HostPlace, Offer, OfferedTensor
from refitd_client.handover.whereabouts import boot_id, host_name
from refitd_client.tensors import DTYPES


def offer_of(version: str, tensors: Mapping[str, Any], places: Mapping[str, HostPlace] | None = None) -> Offer:
    """Describe tensors, all contiguous, as they are published. `places` are those of tensors in shared memory.

    Fingerprints are computed where the tensors are; this waits for them.

    Raises:
        DriverError: the memory of one cannot be lent.
    """
    numbers = fingerprints(tensors.values())
    offered = (
        OfferedTensor(
            name=name,
            dtype=DTYPES[str(tensor.dtype).removeprefix("torch.")],
            shape=tuple(tensor.shape),
            fingerprint=to_text(number),
            place=places[name] if places is not None and name in places else device.place_of(tensor),
        )
        for (name, tensor), number in zip(tensors.items(), numbers, strict=True)
    )
    return Offer(version=version, host=host_name(), boot=boot_id(), pid=os.getpid(), tensors=tuple(offered))
