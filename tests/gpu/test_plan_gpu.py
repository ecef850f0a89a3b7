"""On a real GPU: the driver is read as it is, and a controller stays without a CUDA context."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from refitd_plan.machine import read_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]

# Torch is at hand, tensors are published and the GPUs are planned for; `python` runs on while NVML is asked.
CONTROLLER = """
import contextlib, sys, torch
from refitd_client import RefitClient, RetryPolicy, ServiceUnreachableError, WeightPublisher, plan
from refitd_plan.machine import read_gpus
with WeightPublisher(sys.argv[1], "controlled") as publisher:
    for step in (1, 2):
        publisher.publish({"w": torch.full((1024, 1024), float(step))}, step=step, transport="delta")
with contextlib.suppress(ServiceUnreachableError):
    RefitClient("http://127.0.0.1:1", retry=RetryPolicy(deadline=0.1)).versions()
plan("sglang:d1|fsdp:d1")
assert read_gpus()
if sys.argv[2] == "context":
    held = torch.ones(2**24, device="cuda")
print("ready", torch.cuda.is_initialized(), flush=True)
sys.stdin.readline()
"""


def _used() -> list[int]:
    """Bytes in use on each GPU. Works where a container hides processes from NVML."""
    import pynvml

    nvml: Any = pynvml
    nvml.nvmlInit()
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return [int(nvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles]
    finally:
        nvml.nvmlShutdown()


def _processes() -> set[int]:
    import pynvml

    nvml: Any = pynvml
    nvml.nvmlInit()
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return {int(process.pid) for handle in handles for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    finally:
        nvml.nvmlShutdown()


def _seen(tmp_path: Path, mode: str) -> tuple[str, int, int]:
    """What the controller says of itself, and how many processes and bytes NVML sees more of while it runs."""
    processes, used = _processes(), sum(_used())
    with subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, str(tmp_path / mode), mode],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    ) as controller:
        assert controller.stdout is not None
        said = controller.stdout.readline().strip()
        more = len(_processes() - processes), sum(_used()) - used
        controller.communicate("\n", timeout=60)
    assert controller.returncode == 0
    return said, *more


def test_a_controller_that_calls_the_client_has_no_cuda_context(tmp_path: Path) -> None:
    """NVML has no entry for it, and no memory is taken; a process with a context shows that the look is one."""
    said, processes, memory = _seen(tmp_path, "none")
    assert (said, processes) == ("ready False", 0)
    said, entries, taken = _seen(tmp_path, "context")
    assert said == "ready True"
    assert entries == 1 or taken > 2**26, "NVML shows neither processes nor memory here: nothing was proved"
    assert memory < taken / 4


def test_what_the_driver_says_is_what_cuda_can_have() -> None:
    gpus = read_gpus()
    assert len(gpus) >= torch.cuda.device_count()
    total = torch.cuda.get_device_properties(0).total_memory / 2**30
    assert min(abs((gpu.memory or 0) - total) for gpu in gpus) < total * 0.01
    assert all(gpu.uuid is not None and gpu.uuid.startswith(("GPU-", "MIG-")) for gpu in gpus)
    assert len({gpu.uuid for gpu in gpus}) == len(gpus)
