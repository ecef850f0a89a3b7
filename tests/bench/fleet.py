"""One service and 64 engines: how far apart their update calls are."""

from pathlib import Path

import models
import stack
from figures import Figure, spread

from refitd_client import WeightPublisher

ENGINES = 64
ROUNDS = 15
WARM_UP = 3
LOAD_SECONDS = 0.4  # a real engine's load: 64 of them in one process would otherwise wait for each other's work


def fleet(folder: Path) -> list[Figure]:
    """The time between the first and the last update call of a rollout, as it arrives at the engines."""
    base = models.make(folder / "base")
    weights = models.steps(base, 4)
    root = folder / "root"
    root.mkdir()
    spans: list[float] = []
    with (
        stack.engines(base, folder, ENGINES, load_seconds=LOAD_SECONDS) as urls,
        stack.refitd(root, folder, urls, "--base-model", str(base)) as (_, service),
        WeightPublisher(root, "bench", service_url=service) as publisher,
    ):
        for step in range(1, ROUNDS + WARM_UP + 1):
            publisher.publish(weights[step % 4], step=step).wait(timeout=60)
            arrivals = [at for url in urls for at, path in stack.calls(url) if path == "/update_weights_from_disk"]
            if len(arrivals) != ENGINES:
                raise RuntimeError(f"{len(arrivals)} update calls for {ENGINES} engines")
            if step > WARM_UP:
                spans.append((max(arrivals) - min(arrivals)) * 1000)
    name = f"{ENGINES} engines: last update call after the first, worst of {ROUNDS} rollouts"
    return [Figure(name=name, measured=round(max(spans), 3), unit="ms", limit=150, detail={"spread": spread(spans)})]
