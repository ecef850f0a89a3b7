"""A figure: samples, what they mean, and what was promised."""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from support.run_notes import run_notes


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
        **run_notes("refitd", "httpx", "fastapi", "uvicorn", "torch", "safetensors"),
        "figures": [asdict(figure) | {"met": figure.met} for figure in figures],
    }
