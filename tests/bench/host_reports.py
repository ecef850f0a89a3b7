"""What reports of a thousand hosts cost their hub: real requests at the pace of hosts at rest, from a few processes."""

import asyncio
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import httpx
import msgspec
import psutil
from figures import Figure, spread

from refitd.follow.reporting import RESTS_SECONDS
from refitd_client.contract.follow import Following, HostReport
from refitd_client.contract.hosts import HostEngine, HostEngines, OrderState
from refitd_client.contract.states import EngineState
from support.servers import RefitdServer

HOSTS = 1000
PROCESSES = 2
ENGINES = 8  # of each host
ROUNDS = 3  # reports of each host that are measured


def host_reports(folder: Path) -> list[Figure]:
    """A hub of which each host reports every ten seconds."""
    (folder / "root").mkdir(parents=True)
    with RefitdServer(folder, folder / "root", []) as hub:
        share = HOSTS // PROCESSES
        with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
            calls = [pool.submit(_report, hub.url, number * share, share) for number in range(PROCESSES)]
            time.sleep(1.5 * RESTS_SECONDS)  # all are known by then
            service = psutil.Process(hub.pid)
            before, began = service.cpu_times(), time.monotonic()
            taken = [each for call in calls for each in call.result()]
            after, seconds = service.cpu_times(), time.monotonic() - began
        spent = after.user + after.system - before.user - before.system
        memory = service.memory_info().rss / 2**20
        listed = len(httpx.get(f"{hub.url}/v1/hosts", timeout=60).json()["items"])
    detail = {"hosts": listed, "engines of each": ENGINES, "seconds": seconds, "answered in ms": spread(taken)}
    return [
        Figure(name="a hub's CPU for 1,000 hosts' reports", measured=100 * spent / seconds, unit="%", limit=20.0),
        Figure(name="a hub's memory with 1,000 hosts", measured=memory, unit="MB", limit=200.0, detail=detail),
    ]


def _report(url: str, first: int, count: int) -> list[float]:
    return asyncio.run(_reports(url, first, count))


async def _reports(url: str, first: int, count: int) -> list[float]:
    taken: list[float] = []
    async with httpx.AsyncClient(timeout=60, headers={"Content-Type": "application/json"}) as http:
        for number in range(1, ROUNDS + 2):
            ends = time.monotonic() + RESTS_SECONDS
            for at in range(count):
                name = f"host-{first + at}"
                asked = time.monotonic()
                answer = await http.put(f"{url}/v1/hosts/{name}", content=_body(name, number))
                if not answer.is_success:
                    raise RuntimeError(answer.text)
                taken.append((time.monotonic() - asked) * 1000)
                await asyncio.sleep(max(0.0, (ends - time.monotonic()) / (count - at)))
    return taken[count:]


def _body(name: str, number: int) -> bytes:
    engine = HostEngine(id="127.0.0.1:30000", state=EngineState.IN_SYNC, version="run~v000001")
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
    )
    return msgspec.json.encode(HostReport(told=told, number=number, holds=("run~v000001",)))
