"""A row of the result: what was measured, and how it spread."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Milliseconds, of `n` samples. `note` is the reason where there are none."""

    model: str
    name: str
    p50: float = 0.0
    min: float = 0.0
    max: float = 0.0
    n: int = 0
    note: str = ""


def row(model: str, name: str, samples: Sequence[float]) -> Row:
    """Sum samples up."""
    p50, least, most = (_rounded(each) for each in (statistics.median(samples), min(samples), max(samples)))
    return Row(model=model, name=name, p50=p50, min=least, max=most, n=len(samples))


def refused(model: str, name: str, error: Exception) -> Row:
    """A row of what does not run here, with the reason."""
    said = f"does not run here: {type(error).__name__}: {error}".splitlines()[0]
    return Row(model=model, name=name, note=said)


def timed(act: Callable[[], object]) -> float:
    """Milliseconds from when the GPU is idle until `act` returns."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    act()
    return (time.perf_counter() - began) * 1000


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")
