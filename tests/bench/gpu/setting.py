"""What all scenarios share."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Setting:
    """`engine` is the URL of a running SGLang, and `engine_model` the folder of the model that it was started with."""

    folder: Path
    rounds: int
    engine: str
    engine_model: Path
