"""The three functions of the CUDA driver that torch does not offer: copies by address, and what an address is of.

torch copies a slice of columns through a temporary in pageable memory, at a fifth of the bus. All of it works in the
context that torch has made current in this thread. https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html
"""

import ctypes
from functools import cache

from refitd_client.write.cuda_driver import DEVICE_MEMORY, HOST_MEMORY, Memcpy2D
from refitd_plugin.moves import MemoryMove

_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_MAPPED = 13  # CU_POINTER_ATTRIBUTE_MAPPED: in a range that has memory behind it


class CudaDriverError(RuntimeError):
    """The driver refused. The message has its number."""


def to_device(move: MemoryMove, above: int, stream: int) -> None:
    """Begin a move from page-locked host memory to the device of the current context.

    Args:
        move: what to copy.
        above: the address that the move's source is counted from.
        stream: the CUDA stream to copy along.

    Raises:
        CudaDriverError: the driver refused.
    """
    if move.rows == 1:
        error = _library().cuMemcpyHtoDAsync_v2(move.target, above + move.source, move.width, stream)
    else:
        error = _library().cuMemcpy2DAsync_v2(ctypes.byref(_pitched(move, above, HOST_MEMORY)), stream)
    if error:
        raise CudaDriverError(f"the driver refused a copy of {move.nbytes} bytes to the device (error {error})")


def between_devices(move: MemoryMove, above: int, stream: int) -> None:
    """The same from memory of a device, which may be another process's or another GPU's.

    Args:
        move: what to copy.
        above: the address that the move's source is counted from.
        stream: the CUDA stream to copy along.

    Raises:
        CudaDriverError: the driver refused.
    """
    if move.rows == 1:
        error = _library().cuMemcpyDtoDAsync_v2(move.target, above + move.source, move.width, stream)
    else:
        error = _library().cuMemcpy2DAsync_v2(ctypes.byref(_pitched(move, above, DEVICE_MEMORY)), stream)
    if error:
        raise CudaDriverError(f"the driver refused a copy of {move.nbytes} bytes between devices (error {error})")


def is_mapped(address: int) -> bool:
    """Whether memory is behind an address of a device: not where torch_memory_saver has released it."""
    found = ctypes.c_int(1)
    error = _library().cuPointerGetAttribute(ctypes.byref(found), _MAPPED, address)
    return not error and bool(found.value)


def device_of(address: int) -> int | None:
    """The number of the GPU that memory lies on, as this process counts them; None where the driver does not say."""
    found = ctypes.c_int(-1)
    error = _library().cuPointerGetAttribute(ctypes.byref(found), _DEVICE_ORDINAL, address)
    return None if error or found.value < 0 else found.value


def _pitched(move: MemoryMove, above: int, memory: int) -> Memcpy2D:
    source = above + move.source
    return Memcpy2D(
        srcMemoryType=memory, srcHost=source if memory == HOST_MEMORY else None,
        srcDevice=source if memory == DEVICE_MEMORY else 0, srcPitch=move.source_pitch,
        dstMemoryType=DEVICE_MEMORY, dstDevice=move.target, dstPitch=move.target_pitch,
        WidthInBytes=move.width, Height=move.rows,
    )  # fmt: skip


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuMemcpyHtoDAsync_v2.argtypes = (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    library.cuMemcpyDtoDAsync_v2.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    library.cuMemcpy2DAsync_v2.argtypes = (ctypes.POINTER(Memcpy2D), ctypes.c_void_p)
    library.cuPointerGetAttribute.argtypes = (ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_uint64)
    return library
