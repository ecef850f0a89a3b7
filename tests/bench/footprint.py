"""A journal of 10,000 versions: how fast the API answers, what the service holds in memory, what it does when idle."""

import asyncio
import time
from pathlib import Path

import httpx
import models
import psutil
import stack
from figures import Figure, percentile, spread

from refitd.state.journal import rows
from refitd.state.journal.journal import Journal
from refitd.state.version import VersionRecord
from refitd_client import WeightPublisher
from refitd_client.contract.naming import Order, version_folder
from refitd_client.contract.states import VersionState

VERSIONS = 10_000
READS = 200
IDLE_SECONDS = 20.0


def footprint(folder: Path) -> list[Figure]:
    """Reads, memory and idle CPU of one service that has seen 10,000 versions."""
    base = models.make(folder / "base")
    root = folder / "root"
    root.mkdir()
    asyncio.run(_fill(folder / "state"))
    with (
        stack.engines(base, folder) as (url,),
        stack.refitd(root, folder, [url], "--base-model", str(base)) as (pid, service),
    ):
        with WeightPublisher(root, "bench", service_url=service) as publisher:
            for step, weights in enumerate(models.steps(base, 5), start=VERSIONS + 1):
                publisher.publish(weights, step=step).wait(timeout=30)
        reads = {path: _read(service, path) for path in _paths()}
        idle = _idle(pid)
        memory = psutil.Process(pid).memory_info().rss / 2**20
    slowest = max(reads, key=lambda path: percentile(reads[path], 99))
    return [
        Figure(
            name=f"API reads with {VERSIONS} versions, p99 of the slowest route",
            measured=percentile(reads[slowest], 99),
            unit="ms",
            limit=50,
            detail={path: spread(samples) for path, samples in reads.items()},
        ),
        Figure(name="resident memory of the service", measured=round(memory, 1), unit="MiB", limit=120 * 10**6 / 2**20),
        Figure(name=f"CPU when idle, over {IDLE_SECONDS:g} s", measured=round(idle, 2), unit="% of a core", limit=1),
    ]


async def _fill(state: Path) -> None:
    journal = Journal(state)
    task = asyncio.create_task(journal.run())
    for step in range(1, VERSIONS + 1):
        order = Order(1, step)
        journal.append(
            rows.put(
                VersionRecord(
                    run="bench",
                    order=order,
                    path=f"bench/{version_folder(order)}",
                    state=VersionState.DELETED,
                    created_at="2026-01-01T00:00:00Z",
                ).having(served_at="2026-01-01T00:00:01Z")
            )
        )
    await journal.durable()
    task.cancel()
    await asyncio.wait({task})
    journal.close()


def _paths() -> list[str]:
    newest = f"bench~v{VERSIONS + 5:06d}"
    return [
        "/v1/versions",
        "/v1/versions?limit=500",
        "/v1/versions?run=bench&state=DELETED",
        "/v1/versions?state=SEALED",
        f"/v1/versions/{newest}",
        "/v1/versions/bench~v000001",
        f"/v1/versions/{newest}/wait?timeout=0",
        "/v1/engines",
        f"/v1/explain/{newest}",
        "/v1/reclaim/plan",
        "/metrics",
        "/readyz",
    ]


def _read(service: str, path: str) -> list[float]:
    samples: list[float] = []
    with httpx.Client(base_url=service, trust_env=False) as http:
        for _ in range(READS):
            started = time.monotonic()
            http.get(path).raise_for_status()
            samples.append((time.monotonic() - started) * 1000)
    return samples


def _idle(pid: int) -> float:
    service = psutil.Process(pid)
    before, started = sum(service.cpu_times()[:2]), time.monotonic()
    time.sleep(IDLE_SECONDS)
    return 100 * (sum(service.cpu_times()[:2]) - before) / (time.monotonic() - started)
