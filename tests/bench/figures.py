"""A figure: samples, what they mean, and what was promised."""

import platform
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number with its limit: `measured` (in `unit`) must not be above `limit`."""

    name: str
    measured: float
    unit: str
    limit: float
    detail: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def met(self) -> bool:
        """Whether the promise is kept."""
        return self.measured <= self.limit


def spread(samples: list[float]) -> dict[str, float | int]:
    """The distribution of samples: count, quartiles, tail."""
    points = np.percentile(samples, [0, 25, 50, 75, 99, 100])
    names = ("min", "p25", "p50", "p75", "p99", "max")
    return {"n": len(samples)} | {name: round(float(point), 3) for name, point in zip(names, points, strict=True)}


def percentile(samples: list[float], which: float) -> float:
    """A percentile, rounded to a microsecond where samples are milliseconds."""
    return round(float(np.percentile(samples, which)), 3)


def report(figures: list[Figure], command: str) -> dict[str, Any]:
    """Everything that is committed: figures, machine, software, command."""
    return {
        "command": command,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": {
            "cpu": _cpu(),
            "cores": psutil.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "system": f"{platform.system()} {platform.release().partition('-')[0]} {platform.machine()}",
            "python": sys.version.split()[0],
        },
        "software": {
            name: _version(name) for name in ("refitd", "httpx", "fastapi", "uvicorn", "torch", "safetensors")
        },
        "figures": [asdict(figure) | {"met": figure.met} for figure in figures],
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:  # run from a checkout
        return None


def _commit() -> str:
    found = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
