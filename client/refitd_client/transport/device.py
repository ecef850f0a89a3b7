"""Tensors on a GPU, exported to another process by CUDA IPC with the driver's own functions: torch's use pickle.

A handle is of a whole allocation (torch puts several tensors into one), so a place has an offset as well. Memory of
torch's expandable segments has no such handles: the driver refuses, and nothing is exported.
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html
"""

import ctypes
import sys
from collections.abc import Generator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from refitd_client.checkpoint.header import BITS
from refitd_client.tensors import TORCH_NAMES
from refitd_client.transport.offer import Allocation, DevicePlace

_HANDLE_BYTES = 64
_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID: no two allocations of a process ever have the same
_LAZY_PEER_ACCESS = 1  # also from another GPU of this host, where they can reach each other


class DriverError(RuntimeError):
    """The CUDA driver refused. The message has its error number."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("bytes", ctypes.c_ubyte * _HANDLE_BYTES),)


def place_of(tensor: Any) -> DevicePlace:
    """Where a contiguous CUDA tensor lies. The caller keeps its memory until the offer is withdrawn. Raises
    DriverError: this memory cannot be exported.
    """
    base, size, address = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_uint64(tensor.data_ptr())
    handle = _Handle()
    with _context_of(tensor.device):  # the driver finds only the current GPU's memory
        _done(_driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address), "find an allocation")
        if error := _driver().cuIpcGetMemHandle(ctypes.byref(handle), base):
            raise DriverError(
                f"the CUDA driver exports no such memory (error {error}): torch's expandable segments cannot be "
                "exported (PYTORCH_CUDA_ALLOC_CONF), nor can managed memory"
            )
    serial = serial_at(address.value)
    return DevicePlace(uuid_of(tensor.device), bytes(handle.bytes), serial, address.value - base.value)


def serial_at(address: int) -> int:
    """The number of the allocation that an address of this process is in; 0 where there is none any more."""
    found = ctypes.c_ulonglong()
    error = _driver().cuPointerGetAttribute(ctypes.byref(found), _BUFFER_ID, ctypes.c_uint64(address))
    return 0 if error else found.value


@dataclass(frozen=True, slots=True)
class _OpenedAllocation:
    """An allocation of another process: its address and GPU in this one, and its size where the driver says it."""

    address: int
    size: int | None
    device: int


class DeviceMemory:
    """Allocations of other processes, opened once each and kept: opening takes longer than copying."""

    def __init__(self) -> None:
        self._opened: dict[Allocation, _OpenedAllocation] = {}

    def tensor(self, place: DevicePlace, dtype: str, shape: tuple[int, ...]) -> Any:
        """A view of a tensor, for the device that is current in this thread. It must only be read. Raises DriverError:
        the process is gone, it is this one, or the GPUs cannot reach each other; the tensor ends beyond its allocation,
        where the driver says its size; or it lies on another GPU, of whose memory torch makes a copy.
        """
        torch: Any = sys.modules["torch"]
        nbytes = prod(shape) * BITS[dtype] // 8
        kind = getattr(torch, TORCH_NAMES[dtype])
        if not nbytes:
            return torch.empty(shape, dtype=kind, device="cuda")
        if place.device != uuid_of(torch.device("cuda", torch.cuda.current_device())):
            raise DriverError("it lies on another GPU, and only what is copied as it is can be taken from there")
        ends = {place.allocation: place.offset + nbytes}
        base = self.addresses(ends, torch.cuda.current_device())[place.allocation]
        return torch.as_tensor(_DeviceBytes(base + place.offset, nbytes), device="cuda").view(kind).reshape(shape)

    def keep(self, allocations: Set[Allocation]) -> None:
        """Close all others: the trainer cannot free what is open here. Nothing may read there any more."""
        for allocation in self._opened.keys() - allocations:
            opened = self._opened.pop(allocation)
            with _context_of(opened.device):
                _done(_driver().cuIpcCloseMemHandle(ctypes.c_uint64(opened.address)), "close an allocation")

    def addresses(self, ends: Mapping[Allocation, int], device: int) -> dict[Allocation, int]:
        """Where allocations begin, as a GPU of this process sees them. `ends` are the bytes used of each. Raises
        DriverError: the process is gone, it is this one, or the GPUs cannot reach each other; or an allocation has
        fewer bytes.
        """
        if new := ends.keys() - self._opened.keys():
            with _context_of(device):  # once for all: beside SGLang's loop each step waits for the interpreter's lock
                for allocation in new:
                    self._opened[allocation] = _opened(allocation[0], device)
        for allocation, end in ends.items():
            if (size := self._opened[allocation].size) is not None and end > size:
                raise DriverError(f"a tensor ends at byte {end} of an allocation that has {size}")
        return {allocation: self._opened[allocation].address for allocation in ends}


class _DeviceBytes:
    """Bytes on a GPU, for torch to wrap without a copy (the CUDA array interface, version 3)."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


def _opened(handle: bytes, device: int) -> _OpenedAllocation:
    base, given = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
    opened = _driver().cuIpcOpenMemHandle_v2(ctypes.byref(base), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
    _done(opened, "open an allocation that was exported")
    first, size = ctypes.c_uint64(), ctypes.c_size_t()
    # Where the driver does not say the size of another process's memory, offers are not checked against it.
    is_known = _driver().cuMemGetAddressRange_v2(ctypes.byref(first), ctypes.byref(size), base) == 0
    return _OpenedAllocation(base.value, first.value + size.value - base.value if is_known else None, device)


@cache
def uuid_of(device: Any) -> str:
    """A GPU's name, the same in all processes."""
    torch: Any = sys.modules["torch"]
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


@contextmanager
def _context_of(device: Any) -> Generator[None]:
    """Make a GPU current for the driver's calls in this thread: a new thread has no context until it uses torch."""
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
