"""GPUs as the driver tells them: what is usable, none without a driver, never half of them."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from refitd_client import PlanRefusedError
from refitd_plan.machine import GIB, read_gpus
from refitd_plan.planner import plan


class _NvmlError(Exception):
    def __init__(self, text: str, value: int = 999) -> None:
        super().__init__(text)
        self.value = value


def driver(gpus: int, *, broken: int | None = None, old: bool = False) -> ModuleType:
    """NVML as far as it is asked, with GPUs of 45 GiB of which the driver keeps one."""

    def handle(index: int) -> int:
        if index == broken:
            raise _NvmlError("GPU is lost")
        return index

    def memory(_: int, version: Any = None) -> SimpleNamespace:
        if version is not None and old:
            raise _NvmlError("Function Not Found")
        return SimpleNamespace(total=45 * GIB, reserved=GIB) if version else SimpleNamespace(total=45 * GIB)

    module: Any = ModuleType("pynvml")
    module.NVMLError = _NvmlError
    module.NVML_ERROR_LIBRARY_NOT_FOUND, module.NVML_ERROR_DRIVER_NOT_LOADED = 12, 9
    module.nvmlMemory_v2 = 2
    module.nvmlInit = module.nvmlShutdown = lambda: None
    module.nvmlDeviceGetCount = lambda: gpus
    module.nvmlDeviceGetHandleByIndex = handle
    module.nvmlDeviceGetMemoryInfo = memory
    module.nvmlDeviceGetUUID = lambda index: f"GPU-{index}".encode()
    module.nvmlDeviceGetName = lambda _: "NVIDIA A40"
    return module


def test_a_plan_takes_the_gpus_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver(2))
    assert [(gpu.memory, gpu.uuid, gpu.name) for gpu in read_gpus()] == [
        (44.0, "GPU-0", "NVIDIA A40"),
        (44.0, "GPU-1", "NVIDIA A40"),
    ]
    assert plan("sglang:d1+fsdp:d1", plugin=True).transport == "nccl"
    assert plan("sglang:d1+fsdp:d1", gpus_per_node=1, plugin=True).transport == "handover"


def test_a_gpu_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver(2, broken=1))
    with pytest.raises(PlanRefusedError, match=r"GPU 1 cannot be read \(GPU is lost\)"):
        plan("sglang:d1+fsdp:d1")


@pytest.mark.parametrize(("value", "is_fault"), [(9, False), (12, False), (18, True)])
def test_a_driver_that_does_not_answer_is_told_from_none(
    value: int, is_fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """18: the library is of another release than the driver, as after an update."""
    module = driver(1)

    def refuse() -> None:
        raise _NvmlError("Driver/library version mismatch", value)

    monkeypatch.setattr(module, "nvmlInit", refuse)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    if not is_fault:
        assert read_gpus() == ()
        return
    with pytest.raises(PlanRefusedError, match="version mismatch"):
        read_gpus()


def test_a_driver_that_cannot_count_its_gpus_is_an_error_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    module = driver(1)

    def refuse() -> int:
        raise _NvmlError("Unknown Error")

    monkeypatch.setattr(module, "nvmlDeviceGetCount", refuse)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    with pytest.raises(PlanRefusedError, match="how many GPUs"):
        read_gpus()


def test_without_a_binding_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_gpus() == ()
