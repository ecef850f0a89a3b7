"""How long each stage of a refit takes, in milliseconds of the monotonic clock."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from refitd.engine.port import Stage


class Stopwatch:
    """Times stages, and says when each begins."""

    def __init__(self, on_stage: Callable[[Stage], None]) -> None:
        self._on_stage = on_stage
        self.milliseconds: dict[str, float] = {}

    @contextmanager
    def during(self, stage: Stage) -> Generator[None]:
        """Count what happens inside to `stage`."""
        self._on_stage(stage)
        started = time.perf_counter()
        try:
            yield
        finally:
            spent = (time.perf_counter() - started) * 1000
            self.milliseconds[stage.value] = self.milliseconds.get(stage.value, 0.0) + spent
