"""Times of a benchmark, in milliseconds."""

import statistics
import time
from collections.abc import Callable
from typing import Any


def spread(times: list[float]) -> dict[str, float]:
    """Milliseconds."""
    ordered = sorted(times)
    return {
        "n": len(ordered),
        "p50": round(statistics.median(ordered), 2),
        "min": round(ordered[0], 2),
        "max": round(ordered[-1], 2),
    }


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds, and what it gave."""
    began = time.perf_counter()
    found = work()
    return (time.perf_counter() - began) * 1000, found
