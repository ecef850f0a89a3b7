"""What all scenarios of one model share."""

from dataclasses import dataclass
from pathlib import Path

from shapes import Weights


@dataclass(slots=True, kw_only=True)
class Setting:
    """`copy_ms` is the pinned copy's median in this run, which limits are multiples of; `bus` sets it first."""

    model: str
    weights: Weights
    folder: Path
    rounds: int
    copy_ms: float = 0.0
