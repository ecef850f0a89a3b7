"""From the trainer's word to the engine's door: by notice, and by the watch alone."""

import time
from pathlib import Path

import models
import stack
from figures import Figure, percentile, spread

from refitd_client import RefitClient, WeightPublisher
from refitd_client.contract.naming import Order, version_id
from refitd_client.contract.wire import Notice

ROUNDS = 200
RUN = "bench"


def notice(folder: Path) -> list[Figure]:
    """From the reply that accepts a notice to the first engine call. The watch does not know the directory's name."""
    samples: list[float] = []
    since_sent: list[float] = []
    for client, root, url, staged in _rounds(folder):
        path = root / "drops" / f"step-{staged.step}"
        path.parent.mkdir(exist_ok=True)
        Path(staged.path).rename(path)
        sent = time.monotonic()
        version = client.announce(Notice(run=RUN, step=staged.step, path=str(path)))
        accepted = time.monotonic()
        client.wait(version.id, timeout=30)
        first = stack.first_call(url)
        samples.append((first - accepted) * 1000)
        since_sent.append((first - sent) * 1000)
    detail = {"since it was accepted": spread(samples), "since it was sent": spread(since_sent)}
    return [
        Figure(
            name="notice to first engine call, p50",
            measured=percentile(samples, 50),
            unit="ms",
            limit=10,
            detail=detail,
        ),
        Figure(name="notice to first engine call, p99", measured=percentile(samples, 99), unit="ms", limit=50),
    ]


def watch(folder: Path) -> list[Figure]:
    """From the rename of a version with a manifest to the first engine call, without a notice."""
    samples: list[float] = []
    for client, root, url, staged in _rounds(folder):
        target = root / RUN / Path(staged.path).name
        target.parent.mkdir(exist_ok=True)
        renamed = time.monotonic()
        Path(staged.path).rename(target)
        id_ = version_id(RUN, Order(1, staged.step))
        # Asking the service would keep it busy: the engine says when it is over.
        while (arrivals := [at for at, path in stack.calls(url)]) == []:
            time.sleep(0.01)
        samples.append((min(arrivals) - renamed) * 1000)
        client.wait(id_, timeout=30)
        stack.calls(url)
    name = "rename to first engine call by the watch alone, p99"
    return [
        Figure(name=name, measured=percentile(samples, 99), unit="ms", limit=150, detail={"spread": spread(samples)})
    ]


def _rounds(folder: Path):  # noqa: ANN202 - a generator of one round's parts
    """Publish each step beside the root, so that nothing but what is measured brings it in."""
    base = models.make(folder / "base")
    root, beside = folder / "root", folder / "beside"
    root.mkdir()
    weights = models.steps(base, 4)
    with (
        stack.engines(base, folder) as (url,),
        stack.refitd(root, folder, [url], "--base-model", str(base)) as (_, service),
        RefitClient(service) as client,
        WeightPublisher(beside, RUN) as publisher,
    ):
        stack.calls(url)
        for step in range(1, ROUNDS + 1):
            staged = publisher.publish(weights[step % 4], step=step)
            yield client, root, url, staged
