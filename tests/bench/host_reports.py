"""What reports of a thousand hosts cost their hub: real requests at the hosts' pace, from a few processes."""

import asyncio
import time
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path

import httpx
import msgspec
import psutil
from figures import Figure, spread

from refitd_client.contract.follow import Following, HostEngine, HostEngines, HostReport, OrderState
from refitd_client.contract.states import EngineState
from refitd_hosts.follow.reporting import RESTS_SECONDS
from refitd_hosts.hub.reported import MOST_BUSY_SECONDS
from support.servers import RefitdProgram

HOSTS = 1000
PROCESSES = 2
ENGINES = 8  # of each host
ROUNDS = 3  # reports of each host that are measured
VERSION = "run~v000001"


def host_reports(folder: Path) -> list[Figure]:
    """A hub to which a thousand hosts report: at rest, and while they wait for their turns to pull."""
    return [
        *_measured(folder / "rest", RESTS_SECONDS, waits=False),
        *_measured(folder / "busy", MOST_BUSY_SECONDS, waits=True),
    ]


def _measured(folder: Path, pace: float, *, waits: bool) -> list[Figure]:
    """What reports cost at so many seconds between two of a host. A machine that has more to do takes longer for them,
    so the share is that of what they cost when they come at their pace.
    """
    (folder / "root").mkdir(parents=True)
    with RefitdProgram(folder, folder / "root", []) as hub:
        share = HOSTS // PROCESSES
        with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
            calls = [
                pool.submit(_report, hub.url, number * share, share, pace, waits=waits) for number in range(PROCESSES)
            ]
            while len(httpx.get(f"{hub.url}/v1/engines", timeout=60).json()["items"]) < HOSTS:
                if wait(calls, timeout=1.0).done:
                    raise RuntimeError("the reports ended before all were known")
            service = psutil.Process(hub.pid)
            before, began = service.cpu_times(), time.monotonic()
            wait(calls, return_when=FIRST_COMPLETED)
            after, ended = service.cpu_times(), time.monotonic()
            taken = [took for call in calls for at, took in call.result() if began <= at <= ended]
        spent = after.user + after.system - before.user - before.system
        memory = service.memory_info().rss / 2**20
    what = "reports while they wait to pull" if waits else "reports"
    detail = {
        "engines of each": ENGINES,
        "seconds between two": pace,
        "reports": len(taken),
        "seconds": round(ended - began, 1),
        "ms of a core for each": round(1000 * spent / len(taken), 3),
        "answered in ms": spread(taken),
    }
    busy = 100 * spent / len(taken) * HOSTS / pace
    return [
        Figure(name=f"a hub's CPU for 1,000 hosts' {what}", measured=busy, unit="%", limit=40.0 if waits else 20.0),
        Figure(name=f"a hub's memory, {what}", measured=memory, unit="MB", limit=200.0, detail=detail),
    ]


def _report(url: str, first: int, count: int, pace: float, *, waits: bool) -> list[tuple[float, float]]:
    return asyncio.run(_reports(url, first, count, pace, waits=waits))


async def _reports(url: str, first: int, count: int, pace: float, *, waits: bool) -> list[tuple[float, float]]:
    """When each report was answered (monotonic seconds), and within how many milliseconds."""
    taken: list[tuple[float, float]] = []
    async with httpx.AsyncClient(timeout=60, headers={"Content-Type": "application/json"}) as http:
        for number in range(1, ROUNDS + 2):
            ends = time.monotonic() + pace
            for at in range(count):
                name = f"host-{first + at}"
                asked = time.monotonic()
                answer = await http.put(f"{url}/v1/hosts/{name}", content=_body(name, number, waits=waits))
                if not answer.is_success:
                    raise RuntimeError(answer.text)
                taken.append((time.monotonic(), (time.monotonic() - asked) * 1000))
                await asyncio.sleep(max(0.0, (ends - time.monotonic()) / (count - at)))
    return taken


def _body(name: str, number: int, *, waits: bool) -> bytes:
    engine = HostEngine(id="127.0.0.1:30000", state=EngineState.IN_SYNC, version=VERSION)
    host = HostEngines(follower=name, states={EngineState.IN_SYNC: ENGINES}, engines=(engine,) * ENGINES)
    told = Following(
        follower=name,
        upstream="http://hub:8700",
        upstreams=["http://hub:8700"],
        run="run",
        process=name,
        order=OrderState.NONE,
        configuration="refitd c",
        host=host,
        pulling="run~v000002" if waits else None,
        ahead=0 if waits else None,
    )
    return msgspec.json.encode(HostReport(told=told, number=number, holds=(VERSION,)))
