"""How long the stages of an update take."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stages:
    """Milliseconds by stage. One that comes twice counts together."""

    def __init__(self) -> None:
        """None yet."""
        self.ms: dict[str, float] = {}

    @contextmanager
    def during(self, stage: str) -> Iterator[None]:
        """Count what happens inside."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(stage, (time.perf_counter() - began) * 1000)

    def add(self, stage: str, ms: float) -> None:
        """Count what somebody else has measured."""
        self.ms[stage] = round(self.ms.get(stage, 0.0) + ms, 2)
