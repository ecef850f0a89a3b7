"""The event stream under load: 200 engines that say ten things a second each, and 20 who watch."""

import json
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import stack
from figures import Figure, percentile, spread

ENGINES = 200
RATE = 10.0  # events of each engine in a second
WATCHERS = 20
SECONDS = 20.0
ASK_EVERY = 0.02
PATHS = ("/healthz", "/v1/versions", "/v1/engines", "/v1/overview")
HERE = Path(__file__).parent


def stream(folder: Path) -> list[Figure]:
    """CPU of the service's process, latency of its API meanwhile, and events that a watcher did not see."""
    command = [sys.executable, str(HERE / "talker.py"), str(folder), str(ENGINES), str(RATE), str(SECONDS)]
    with stack.process(command, folder / "talker.log", "refitd") as (pid, (url,)):
        watching = subprocess.Popen(
            [sys.executable, str(HERE / "watchers.py"), url, str(WATCHERS)], stdout=subprocess.PIPE, text=True
        )
        out = watching.stdout
        if out is None or "ready" not in out.readline():
            raise RuntimeError("the watchers did not start")
        with httpx.Client(base_url=url, trust_env=False) as http:
            before = http.get("/_said").json()["last"]
            busy, latencies = _ask(http, psutil.Process(pid))
            time.sleep(2.0)  # it has said everything
            last = http.get("/_said").json()["last"]
        watching.terminate()
        seen = json.loads(out.readline())
        watching.wait(10)
        out.close()
    missed = sum(wrong + abs(last - final) for _, final, wrong in seen)
    per_second = (last - before) / SECONDS
    name = f"{ENGINES} engines x {RATE:g} events/s, {WATCHERS} watchers"
    detail = {"events a second": round(per_second), "events seen by each": sorted({count for count, _, _ in seen})}
    if per_second < 0.95 * ENGINES * RATE:
        raise RuntimeError(f"the service said {per_second:.0f} things a second instead of {ENGINES * RATE:.0f}")
    everything = [sample for samples in latencies.values() for sample in samples]
    by_path = {path: spread(samples) for path, samples in latencies.items()}
    return [
        Figure(name=f"{name}: service CPU", measured=round(busy * 100, 1), unit="% of a core", limit=50, detail=detail),
        Figure(
            name=f"{name}: API latency, p99", measured=percentile(everything, 99), unit="ms", limit=50, detail=by_path
        ),
        Figure(name=f"{name}: events lost or sent twice", measured=missed, unit="events", limit=0),
    ]


def _ask(http: httpx.Client, service: psutil.Process) -> tuple[float, dict[str, list[float]]]:
    """Ask one thing after the other while it lasts; the share of a core that the service took meanwhile."""
    latencies: dict[str, list[float]] = {path: [] for path in PATHS}
    spent, began = sum(service.cpu_times()[:2]), time.monotonic()
    number = 0
    while time.monotonic() - began < SECONDS - 1:
        path = PATHS[number % len(PATHS)]
        asked = time.monotonic()
        http.get(path).raise_for_status()
        latencies[path].append((time.monotonic() - asked) * 1000)
        number += 1
        time.sleep(ASK_EVERY)
    return (sum(service.cpu_times()[:2]) - spent) / (time.monotonic() - began), latencies
