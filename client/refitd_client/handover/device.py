"""Tensors on a GPU, lent to another process by CUDA IPC: the driver's own functions, since torch's pickle.

A handle is one of a whole allocation (torch puts several tensors into one), so a place has an offset as well. Memory of
torch's expandable segments has no such handles: the driver says so, and nothing is lent.
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html
"""

import ctypes
import sys
from collections.abc import Generator, Set
from contextlib import contextmanager
from functools import cache
from math import prod
from typing import Any

from refitd_client.handover.offer import DevicePlace
from refitd_client.header import BITS
from refitd_client.tensors import TORCH_NAMES

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # also from another GPU of this host, where they can reach each other


class DriverError(RuntimeError):
    """The CUDA driver refused. The message has its number."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("bytes", ctypes.c_ubyte * _HANDLE_BYTES),)


def place_of(tensor: Any) -> DevicePlace:
    """Where a contiguous CUDA tensor lies. Its memory stays the caller's, who keeps it until the offer is back.

    Raises:
        DriverError: this memory cannot be lent.
    """
    base, size, address = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_uint64(tensor.data_ptr())
    _done(_driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address), "find an allocation")
    handle = _Handle()
    if error := _driver().cuIpcGetMemHandle(ctypes.byref(handle), base):
        raise DriverError(
            f"the CUDA driver lends no such memory (error {error}): torch's expandable segments cannot be lent "
            "(PYTORCH_CUDA_ALLOC_CONF), nor can managed memory"
        )
    return DevicePlace(_uuid_of(tensor.device), bytes(handle.bytes), address.value - base.value)


class DeviceMemory:
    """Allocations of other processes, opened once each. Keep it: opening takes longer than copying does."""

    def __init__(self) -> None:
        self._bases: dict[bytes, tuple[int, int]] = {}

    def tensor(self, place: DevicePlace, dtype: str, shape: tuple[int, ...]) -> Any:
        """A view of the tensor that lies there, to be used on the device that is current in this thread. Read it only.

        Raises:
            DriverError: the process is gone, it is this one, or the GPUs cannot reach each other.
        """
        torch: Any = sys.modules["torch"]
        nbytes = prod(shape) * BITS[dtype] // 8
        kind = getattr(torch, TORCH_NAMES[dtype])
        if not nbytes:
            return torch.empty(shape, dtype=kind, device="cuda")
        seen = _Seen(self.address(place.handle, torch.cuda.current_device()) + place.offset, nbytes)
        return torch.as_tensor(seen, device="cuda").view(kind).reshape(shape)

    def keep(self, handles: Set[bytes]) -> None:
        """Give back all others: what is held here the trainer cannot free. Nothing may read there any more."""
        for handle in self._bases.keys() - handles:
            address, device = self._bases.pop(handle)
            with _context_of(device):
                _done(_driver().cuIpcCloseMemHandle(ctypes.c_uint64(address)), "give an allocation back")

    def address(self, handle: bytes, device: int) -> int:
        """Where an allocation begins, as a GPU of this process sees it.

        Raises:
            DriverError: as `tensor`.
        """
        if handle not in self._bases:
            base, given = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
            with _context_of(device):
                opened = _driver().cuIpcOpenMemHandle_v2(ctypes.byref(base), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
            _done(opened, "open an allocation that was lent")
            self._bases[handle] = base.value, device
        return self._bases[handle][0]


class _Seen:
    """Bytes on a GPU, as torch takes them over without a copy (the CUDA array interface, version 3)."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


@cache
def _uuid_of(device: Any) -> str:
    """A GPU's name in all processes."""
    torch: Any = sys.modules["torch"]
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


@contextmanager
def _context_of(device: int) -> Generator[None]:
    """Have the driver's calls in this thread work on a GPU: a new thread has no context until torch is used in it."""
    torch: Any = sys.modules["torch"]
    with torch.cuda.device(device):
        torch.cuda.mem_get_info(device)  # any call of CUDA's runtime makes the GPU's context current
        yield


def _done(error: int, what: str) -> None:
    if error:
        raise DriverError(f"the CUDA driver could not {what} (error {error})")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
