"""A row of the result: what was measured, how it spread, and what was wanted, relative to the same run."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`limit` is what p50 should not exceed; `stages` are medians of its parts, in order, in the same unit."""

    scenario: str
    model: str
    name: str
    unit: str
    p50: float
    min: float
    max: float
    n: int
    limit: float | None = None
    stages: dict[str, float] = field(default_factory=dict[str, float])
    note: str = ""


def row(
    scenario: str,
    model: str,
    name: str,
    samples: Sequence[float],
    *,
    unit: str = "ms",
    limit: float | None = None,
    stages: Sequence[Mapping[str, float]] = (),
    note: str = "",
) -> Row:
    """Sum samples up."""
    return Row(
        scenario=scenario, model=model, name=name, unit=unit, n=len(samples), p50=_rounded(statistics.median(samples)),
        min=_rounded(min(samples)), max=_rounded(max(samples)), limit=None if limit is None else _rounded(limit),
        stages=medians(stages), note=note,
    )  # fmt: skip


def refused(scenario: str, model: str, name: str, error: Exception) -> Row:
    """A row of what does not run here, with the reason."""
    said = f"does not run here: {type(error).__name__}: {error}".splitlines()[0]
    return Row(scenario=scenario, model=model, name=name, unit="ms", n=0, p50=0, min=0, max=0, note=said)


def medians(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each of the parts that all samples have."""
    names = [name for name in (samples[0] if samples else ()) if all(name in sample for sample in samples)]
    return {name: _rounded(statistics.median(sample[name] for sample in samples)) for name in names}


def timed(act: Callable[[], object]) -> float:
    """Milliseconds from when the GPU is idle until `act` returns."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    act()
    return (time.perf_counter() - began) * 1000


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")
