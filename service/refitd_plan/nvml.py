"""The machine's GPUs, as the driver reports them through NVML (package `nvidia-ml-py`, which `refitd[plan]` brings)."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from refitd_client.errors import PlanRefusedError
from refitd_plan.machine import GIB, Gpu

_INSTEAD = "give --gpus-per-node and --gpu-memory in its place"


@contextmanager
def opened() -> Generator[Any]:
    """NVML for as long as the context lasts; None where there is no NVIDIA driver, or no `nvidia-ml-py` to ask it.

    Raises:
        PlanRefusedError: there is a driver that does not answer (after an update, its library is of another release).
    """
    try:
        import pynvml  # pyright: ignore[reportMissingTypeStubs]
    except ImportError:
        yield None
        return
    nvml: Any = pynvml  # it has no annotations
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if error.value not in {nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED}:
            raise PlanRefusedError(f"the NVIDIA driver does not answer ({error}): {_INSTEAD}") from error
        yield None  # nothing is wrong on a machine without GPUs
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def read_gpus() -> tuple[Gpu, ...]:
    """The GPUs of this machine; none where there is no NVIDIA driver, or no `nvidia-ml-py` to ask it.

    Raises:
        PlanRefusedError: there are GPUs and one of them cannot be read, or the driver does not say how many there are.
    """
    with opened() as nvml:
        if nvml is None:
            return ()
        try:
            count = int(nvml.nvmlDeviceGetCount())
        except nvml.NVMLError as error:
            raise PlanRefusedError(f"the driver does not say how many GPUs there are ({error}): {_INSTEAD}") from error
        return tuple(_gpu(nvml, index) for index in range(count))


def _gpu(nvml: Any, index: int) -> Gpu:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
        try:  # the driver keeps some of the memory to itself: of an A40's 44.99 GiB, CUDA hands out 44.42
            found = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
            memory = int(found.total) - int(found.reserved)
        except (nvml.NVMLError, AttributeError):
            memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
        return Gpu(memory=memory / GIB, uuid=_text(uuid), name=_text(name))
    except nvml.NVMLError as error:
        raise PlanRefusedError(f"GPU {index} cannot be read ({error}): {_INSTEAD}") from error


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
