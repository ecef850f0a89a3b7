"""What a broadcast over NCCL needs: GPUs that are not shared, the right variables, and one release of the library."""

import mmap
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from refitd.diagnose.doctor.finding import CheckName, Finding, failed, good, unknown, warning
from refitd.diagnose.doctor.processes import PROC, family_of
from refitd_client.errors import PlanRefusedError
from refitd_plan.machine import Gpu
from refitd_plan.nvml import opened, read_gpus

_NCCL_LIBRARY = "libnccl.so"
_NCCL_VERSION = re.compile(rb"NCCL version (\d+\.\d+\.\d+)")  # what the library writes into its log
_CUMEM = "NCCL_CUMEM_ENABLE"
_DEBUG = "NCCL_DEBUG"


def look_at_gpus() -> Sequence[Gpu] | str:
    """The GPUs of this host, or why they cannot be read."""
    try:
        return read_gpus()
    except PlanRefusedError as error:
        return str(error)


def gpus_of(pids: set[int]) -> list[str]:
    """UUIDs of the GPUs that processes compute on; none where NVML does not tell (in containers)."""
    found: list[str] = []
    with suppress(PlanRefusedError), opened() as driver:
        if driver is None:
            return []
        nvml: Any = driver
        try:
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                if pids & {int(row.pid) for row in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}:
                    found.append(str(nvml.nvmlDeviceGetUUID(handle)))
        except nvml.NVMLError:
            return []
    return found


def judge_gpus(gpus: Sequence[Gpu] | str, used: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    """The host's GPUs, and who computes on which. `used` maps engines, and the trainer, to UUIDs."""
    if isinstance(gpus, str):
        fix = "see nvidia-smi: the driver or a GPU is at fault"
        yield failed(CheckName.GPUS, "host", gpus, fix)
        return
    if not gpus:
        text = "no GPU can be read here: no driver, or no nvidia-ml-py"
        yield unknown(CheckName.GPUS, "host", text)
        return
    names = [gpu.uuid or "?" for gpu in gpus]
    if len(set(names)) < len(names):
        text, fix = f"several GPUs have one UUID: {', '.join(names)}", "see nvidia-smi -L: NCCL takes them for one"
        yield warning(CheckName.GPUS, "host", text, fix)
    else:
        yield good(CheckName.GPUS, "host", ", ".join(names))
    for name, uuids in used.items():
        yield _shared(name, uuids, used)


def _shared(name: str, uuids: Sequence[str], used: Mapping[str, Sequence[str]]) -> Finding:
    if not uuids:
        text = "on which GPUs it computes cannot be seen: it is elsewhere, or in a container, where NVML tells nothing"
        return unknown(CheckName.GPUS, name, text)
    others = sorted(other for other, theirs in used.items() if other != name and set(theirs) & set(uuids))
    text = f"computes on {', '.join(uuids)}"
    if not others:
        return good(CheckName.GPUS, name, text)
    return good(
        CheckName.GPUS, name, f"{text}, which it shares with {', '.join(others)}: NCCL is ruled out between them"
    )


def judge_nccl(name: str, environment: Mapping[str, str] | None, *, is_sglang: bool) -> Iterator[Finding]:
    """Whether a process is ready for a broadcast. SGLang sets NCCL_CUMEM_ENABLE=0 itself unless it is set."""
    fix = f"set {_CUMEM}=0 on both sides: else the trainer joins the group and the first broadcast fails"
    if environment is None:
        yield unknown(CheckName.NCCL, name, "its variables cannot be seen from here", fix)
        return
    said = environment.get(_CUMEM, "0" if is_sglang else None)
    if said == "0":
        yield good(CheckName.NCCL, name, f"{_CUMEM} is 0")
    else:
        yield failed(CheckName.NCCL, name, f"{_CUMEM} is {'not set' if said is None else said}", fix)
    if environment.get(_DEBUG, "").upper() == "INFO":
        yield warning(CheckName.NCCL, name, f"{_DEBUG} is INFO", f"unset {_DEBUG}: it writes for every operation")


def nccl_of(pid: int) -> str | None:
    """The release of NCCL that a process or its children have loaded; None where none can be seen."""
    for library in sorted({path for one in family_of(pid) for path in _loaded(one)}):
        if (version := version_of(library)) is not None:
            return version
    return None


def version_of(library: Path) -> str | None:
    """The release that a library says it is, None where it says none."""
    with (
        suppress(OSError, ValueError),  # an empty file cannot be mapped
        library.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        found = _NCCL_VERSION.search(content)
        return None if found is None else found[1].decode()
    return None


def _loaded(pid: int) -> Iterator[Path]:
    """The library's files, as this host can open them: beneath the process's own root."""
    with suppress(OSError):
        for line in (PROC / str(pid) / "maps").read_text().splitlines():
            path = line.partition("/")[2]
            if _NCCL_LIBRARY in path:
                yield PROC / str(pid) / "root" / path


def judge_releases(releases: Mapping[str, str | None]) -> Iterator[Finding]:
    """Whether all that have NCCL loaded have the same. `releases` maps processes to what they have."""
    known = {name: release for name, release in releases.items() if release is not None}
    if len(set(known.values())) > 1:
        told = ", ".join(f"{name} has {release}" for name, release in sorted(known.items()))
        fix = "install one release of nvidia-nccl in both environments: others refuse each other"
        yield failed(CheckName.NCCL, "libraries", f"NCCL differs: {told}", fix)
    elif known:
        yield good(CheckName.NCCL, "libraries", f"NCCL {next(iter(known.values()))} in {', '.join(sorted(known))}")
