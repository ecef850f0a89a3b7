"""One service and many engines: how far apart the calls to load are, and what a thousand of them cost.

64 embedded engines show how calls spread. With `--engines N` these are N light ones (`light_engines.py`) in processes
of their own, and the service is measured too: its processor time when idle, its memory, its API during updates.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import models
import psutil
import stack
from figures import Figure, percentile, spread

from refitd_client import WeightPublisher

ENGINES = 64
ROUNDS = 15
WARM_UP = 3
LOAD_SECONDS = 0.4  # a real engine's load: 64 of them in one process would otherwise wait for each other's work
PROCESSES = 2  # of light engines
PAUSED_AT_MOST = 1000.0  # milliseconds
ASK_EVERY = 0.02
IDLE_SECONDS = 30.0
SETTLE_SECONDS = 15.0  # until looks are spread again after an update
PATHS = ("/healthz", "/v1/versions?engines=false", "/v1/engines", "/v1/overview")
PAUSE, LOAD, RESUME = "/pause_generation", "/update_weights_from_disk", "/continue_generation"
HERE = Path(__file__).parent


def fleet(folder: Path, engines: int = ENGINES) -> list[Figure]:
    """The time between the first and the last call to load of an update, as it arrives at the engines."""
    if engines != ENGINES:
        return _many(folder, engines)
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
            span = _calls(urls).spans[LOAD]
            if step > WARM_UP:
                spans.append(span)
    name = f"{ENGINES} engines: last call to load after the first, worst of {ROUNDS} updates"
    return [Figure(name=name, measured=round(max(spans), 3), unit="ms", limit=150, detail={"spread": spread(spans)})]


@dataclass(frozen=True, slots=True)
class Calls:
    """One update, in milliseconds: from the first to the last call of each kind, and how long each engine paused."""

    spans: dict[str, float]
    pauses: list[float]


def _calls(urls: list[str]) -> Calls:
    """The calls that have arrived since the last time."""
    arrivals: dict[str, list[float]] = {PAUSE: [], LOAD: [], RESUME: []}
    with httpx.Client(trust_env=False) as http:
        for url in urls:
            for at, path in http.get(f"{url}/_calls").json():
                if path in arrivals:
                    arrivals[path].append(at)
    if any(len(each) != len(urls) for each in arrivals.values()):
        raise RuntimeError(f"{ {path: len(each) for path, each in arrivals.items()} } calls for {len(urls)} engines")
    pauses = [(end - begin) * 1000 for begin, end in zip(arrivals[PAUSE], arrivals[RESUME], strict=True)]
    return Calls({path: (max(each) - min(each)) * 1000 for path, each in arrivals.items()}, pauses)


def _many(folder: Path, engines: int) -> list[Figure]:
    base = models.make(folder / "base")
    weights = models.steps(base, 4)
    root = folder / "root"
    root.mkdir()
    spans: dict[str, list[float]] = {PAUSE: [], LOAD: [], RESUME: []}
    pauses: list[float] = []
    took: list[float] = []
    spent: list[float] = []
    with ExitStack() as held:
        urls = held.enter_context(_light(base, folder, engines))
        listed = folder / "engines.yaml"
        listed.write_text("engines:\n" + "".join(f"  - {url}\n" for url in urls))
        more = ("--engines-file", str(listed), "--base-model", str(base))
        pid, service = held.enter_context(stack.refitd(root, folder, [], *more, count=engines))
        process = psutil.Process(pid)
        publisher = held.enter_context(WeightPublisher(root, "bench", service_url=service))
        with _asker(service) as asker:  # what is idle has no reader
            for step in range(1, ROUNDS + WARM_UP + 1):
                if step == WARM_UP + 1:
                    _asked(asker)
                before, began = _spent(process), time.monotonic()
                publisher.publish(weights[step % 4], step=step).wait(timeout=120)
                seconds, cpu = time.monotonic() - began, _spent(process) - before
                found = _calls(urls)
                if step > WARM_UP:
                    took.append(seconds * 1000)
                    spent.append(cpu / engines * 1000)
                    pauses += found.pauses
                    for path, span in found.spans.items():
                        spans[path].append(span)
            latencies = _asked(asker)
        memory = process.memory_info().rss / 2**20
        time.sleep(SETTLE_SECONDS)
        before, began = _spent(process), time.monotonic()
        time.sleep(IDLE_SECONDS)
        idle = 100 * (_spent(process) - before) / (time.monotonic() - began)
        threads = process.num_threads()
    samples = [sample for each in latencies.values() for sample in each]
    machine = {"load average at the end": [round(each, 2) for each in os.getloadavg()]}
    return [
        Figure(
            name=f"{engines} engines: service CPU when idle, over {IDLE_SECONDS:g} s",
            measured=round(idle, 2),
            unit="% of a core",
            limit=10,
            detail={"threads": threads} | machine,
        ),
        Figure(name=f"{engines} engines: resident memory", measured=round(memory, 1), unit="MiB", limit=300e6 / 2**20),
        Figure(
            name=f"{engines} engines: last call to load after the first, worst of {ROUNDS} updates",
            measured=round(max(spans[LOAD]), 1),
            unit="ms",
            limit=500,
            detail={
                "calls to load": spread(spans[LOAD]),
                "pause calls": spread(spans[PAUSE]),
                "published until served": spread(took),
                "service CPU for each engine": spread(spent),
            },
        ),
        Figure(
            name=f"{engines} engines: an engine is paused, of which it loads for {LOAD_SECONDS * 1000:g} ms; mean",
            measured=round(sum(pauses) / len(pauses), 1),
            unit="ms",
            limit=PAUSED_AT_MOST,
            detail={"pauses": spread(pauses)},
        ),
        Figure(
            name=f"{engines} engines: API latency during updates, p99",
            measured=percentile(samples, 99),
            unit="ms",
            limit=60,
            detail={path: spread(each) for path, each in latencies.items()},
        ),
    ]


def _spent(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


@contextmanager
def _light(model: Path, folder: Path, count: int) -> Generator[list[str]]:
    """Light engines in a few processes; yields their URLs."""
    shares = [count // PROCESSES + (number < count % PROCESSES) for number in range(PROCESSES)]
    with ExitStack() as held:
        urls: list[str] = []
        for number, share in enumerate(shares):
            command = [sys.executable, str(HERE / "light_engines.py"), str(share), str(model), str(LOAD_SECONDS)]
            _, more = held.enter_context(stack.process(command, folder / f"light-{number}.log", "light", share))
            urls += more
        yield urls


@contextmanager
def _asker(service: str) -> Generator["subprocess.Popen[str]"]:
    command = [sys.executable, str(HERE / "asker.py"), service, str(ASK_EVERY), *PATHS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as asker:
        if asker.stdout is None or "ready" not in asker.stdout.readline():
            raise RuntimeError("the asker did not start")
        yield asker  # leaving closes its standard input, which ends it


def _asked(asker: "subprocess.Popen[str]") -> dict[str, list[float]]:
    """What it took to answer since the last time, in milliseconds."""
    if asker.stdin is None or asker.stdout is None:
        raise RuntimeError("no asker")
    asker.stdin.write("\n")
    asker.stdin.flush()
    return json.loads(asker.stdout.readline())
