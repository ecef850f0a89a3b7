"""One call of SGLang's function that updates weights."""

from collections.abc import Callable
from dataclasses import dataclass, field

from refitd_sglang.stages import Stages


@dataclass(frozen=True, slots=True)
class Call:
    """One call of SGLang's function: `stock` is that function, to be called with a path and a load format."""

    path: str
    load_format: str
    recapture: bool
    stock: Callable[[str, str, bool], tuple[bool, str]]
    stages: Stages = field(default_factory=Stages)
