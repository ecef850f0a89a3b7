"""The GPUs of this host, by UUID, and who computes on which of them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from refitd.diagnose.doctor.finding import Check, Finding, Verdict, good
from refitd_client.errors import PlanRefusedError
from refitd_plan.machine import Gpu
from refitd_plan.nvml import opened, read_gpus


def look_at_gpus() -> Sequence[Gpu] | str:
    """The GPUs of this host, or why they cannot be read."""
    try:
        return read_gpus()
    except PlanRefusedError as error:
        return str(error)


def gpus_of(pids: set[int]) -> list[str]:
    """UUIDs of the GPUs that processes compute on; none where NVML does not tell (in containers)."""
    with suppress(PlanRefusedError), opened() as nvml:
        return [] if nvml is None else _used(nvml, pids)
    return []


def _used(nvml: Any, pids: set[int]) -> list[str]:
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return [str(nvml.nvmlDeviceGetUUID(handle)) for handle in handles if pids & _computing(nvml, handle)]
    except nvml.NVMLError:
        return []


def _computing(nvml: Any, handle: Any) -> set[int]:
    return {int(row.pid) for row in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}


def judge_gpus(gpus: Sequence[Gpu] | str, used: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    """The host's GPUs, and who computes on which. `used` maps engines, and the trainer, to UUIDs."""
    if isinstance(gpus, str):
        fix = "see nvidia-smi: the driver or a GPU is at fault"
        yield Finding(check=Check.GPUS, subject="host", verdict=Verdict.FAILED, text=gpus, fix=fix)
        return
    if not gpus:
        text = "no GPU can be read here: no driver, or no nvidia-ml-py"
        yield Finding(check=Check.GPUS, subject="host", verdict=Verdict.UNKNOWN, text=text)
        return
    names = [gpu.uuid or "?" for gpu in gpus]
    if len(set(names)) < len(names):
        text, fix = f"several GPUs have one UUID: {', '.join(names)}", "see nvidia-smi -L: NCCL takes them for one"
        yield Finding(check=Check.GPUS, subject="host", verdict=Verdict.WARNING, text=text, fix=fix)
    else:
        yield good(Check.GPUS, "host", ", ".join(names))
    for name, uuids in used.items():
        yield _shared(name, uuids, used)


def _shared(name: str, uuids: Sequence[str], used: Mapping[str, Sequence[str]]) -> Finding:
    if not uuids:
        text = "on which GPUs it computes cannot be seen: it is elsewhere, or in a container, where NVML tells nothing"
        return Finding(check=Check.GPUS, subject=name, verdict=Verdict.UNKNOWN, text=text)
    others = sorted(other for other, theirs in used.items() if other != name and set(theirs) & set(uuids))
    text = f"computes on {', '.join(uuids)}"
    if not others:
        return good(Check.GPUS, name, text)
    return good(Check.GPUS, name, f"{text}, which it shares with {', '.join(others)}: NCCL is ruled out between them")
