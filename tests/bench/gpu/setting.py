"""What all scenarios of one model share."""

from dataclasses import dataclass
from pathlib import Path

from shapes import Weights


@dataclass(slots=True, kw_only=True)
class Setting:
    """`copy_ms` is the pinned copy's median in this run, which limits are multiples of; `bus` sets it first.

    `engine` is the URL of a running SGLang, and `engine_model` the folder of the model that it was started with.
    """

    model: str
    weights: Weights
    folder: Path
    rounds: int
    engine: str | None = None
    engine_model: Path | None = None
    copy_ms: float = 0.0
