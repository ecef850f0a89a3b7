"""The machine's GPUs, as the driver tells them through NVML (package `nvidia-ml-py`, which `refitd[plan]` brings)."""

from typing import Any

from refitd_client.errors import PlanRefusedError
from refitd_client.planning.machine import GIB, Gpu


def read_gpus() -> tuple[Gpu, ...]:
    """The GPUs of this machine; none where there is no NVIDIA driver, or no `nvidia-ml-py` to ask it.

    Raises:
        PlanRefusedError: there are GPUs and one of them cannot be read.
    """
    try:
        import pynvml  # pyright: ignore[reportMissingTypeStubs]
    except ImportError:
        return ()
    nvml: Any = pynvml  # it has no annotations
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()  # no driver: nothing is wrong on a machine without GPUs
    try:
        return tuple(_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Gpu:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
        return Gpu(memory=_usable(nvml, handle) / GIB, uuid=_text(uuid), name=_text(name))
    except nvml.NVMLError as error:
        raise PlanRefusedError(
            f"GPU {index} cannot be read ({error}): give --gpus-per-node and --gpu-memory in its place"
        ) from error


def _usable(nvml: Any, handle: Any) -> int:
    """The driver keeps some of the memory to itself: of an A40's 44.99 GiB, CUDA hands out 44.42."""
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except (nvml.NVMLError, AttributeError):
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    return int(memory.total) - int(memory.reserved)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
