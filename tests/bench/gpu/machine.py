"""The machine and the software of a run."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """What is written beside the figures."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": {
            "gpu": torch.cuda.get_device_name(),
            "cpu": _cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "system": f"{platform.system()} {platform.release().partition('-')[0]} {platform.machine()}",
            "python": platform.python_version(),
        },
        "software": {name: _version(name) for name in ("torch", "triton", "numpy", "safetensors", "xxhash", "sglang")},
    }


def _commit() -> str:
    found = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
