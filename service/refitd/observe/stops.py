"""What stops everything else: an event loop that is late, and the collector of garbage."""

import asyncio
import gc
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Histogram

BUCKETS = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)  # seconds
LOOK_SECONDS = 0.25


class Stops:
    """Two histograms, and what feeds them while the service runs."""

    def __init__(self, registry: CollectorRegistry, look_every: float = LOOK_SECONDS) -> None:
        """Register both. Nothing is measured yet."""
        self._look_every = look_every
        self._lag = Histogram(
            "refitd_event_loop_lag_seconds",
            "How much later than it asked for a task of the event loop went on",
            buckets=BUCKETS,
            registry=registry,
        )
        self._collections = Histogram(
            "refitd_gc_seconds",
            "Time for which everything stood still while garbage was collected",
            ["generation"],
            buckets=BUCKETS,
            registry=registry,
        )
        for generation in range(3):
            self._collections.labels(str(generation))
        self._began = 0.0

    async def run(self) -> None:
        """Look at the loop's lateness until cancelled."""
        with self._watching_garbage():
            loop = asyncio.get_running_loop()
            while True:
                due = loop.time() + self._look_every
                await asyncio.sleep(self._look_every)
                self._lag.observe(max(0.0, loop.time() - due))

    @contextmanager
    def _watching_garbage(self) -> Generator[None]:
        gc.callbacks.append(self._on_garbage)
        try:
            yield
        finally:
            gc.callbacks.remove(self._on_garbage)

    def _on_garbage(self, phase: str, info: dict[str, Any]) -> None:
        # Called in whichever thread sets a collection off, and never in two at a time.
        if phase == "start":
            self._began = time.perf_counter()
        elif self._began:
            self._collections.labels(str(info["generation"])).observe(time.perf_counter() - self._began)
