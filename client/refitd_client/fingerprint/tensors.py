"""The fingerprints of torch tensors, wherever they are: on the GPU by the kernel, in host memory by numpy.

No tensor leaves its device. Nothing is imported that the process does not have: who passes a tensor has torch, and who
passes one on a GPU has a CUDA context.
"""

import importlib.util
import sys
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np

from refitd_client.fingerprint import host


def fingerprints(tensors: Iterable[Any]) -> list[int]:
    """The fingerprints of dense tensors, in their order. Waits for the GPU once, however many there are.

    Each tensor is taken when it is its turn, and let go of then.
    """
    from refitd_client.fingerprint import twin

    torch: Any = sys.modules["torch"]
    found: list[Any] = []
    for tensor in tensors:
        bits: Any = twin.flat_bits(tensor)
        if bits.device.type == "cpu":
            found.append(host.fingerprint(_unsigned(bits)))
        elif bits.is_cuda and has_triton():
            found.append(_by_kernel(bits, torch.zeros(1, dtype=torch.int64, device=bits.device)))
        else:
            found.append(twin.fingerprint(bits))
    return _gathered(found)


def _by_kernel(bits: Any, out: Any) -> Any:
    from refitd_client.fingerprint import kernel

    kernel.add_fingerprint(bits, out)
    return out[0]


def _gathered(found: list[Any]) -> list[int]:
    """One copy for all results of a device: each alone would wait for the device."""
    torch: Any = sys.modules["torch"]
    numbers = {place: each for place, each in enumerate(found) if isinstance(each, int)}
    devices = {each.device for each in found if not isinstance(each, int)}
    for device in devices:
        places = [place for place, each in enumerate(found) if place not in numbers and each.device == device]
        together = torch.stack([found[place] for place in places]).cpu().numpy().view(np.uint64)
        numbers |= dict(zip(places, map(int, together), strict=True))
    return [numbers[place] for place in range(len(found))]


def _unsigned(bits: Any) -> host.Bits:
    array = bits.numpy()
    return array.view(f"u{array.itemsize}")


@cache
def has_triton() -> bool:
    """Whether kernels can be compiled here."""
    return importlib.util.find_spec("triton") is not None
