"""What is written beside measured figures: when and where, and of which commit."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def run_notes(*packages: str) -> dict[str, Any]:
    """The time, the commit, the machine and the versions of packages."""
    found = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": found.stdout.strip() or "unknown",
        "machine": {
            "cpu": _cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "system": f"{platform.system()} {platform.release().partition('-')[0]} {platform.machine()}",
            "python": platform.python_version(),
        },
        "software": {name: _version(name) for name in packages},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:  # run from a checkout
        return None


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
