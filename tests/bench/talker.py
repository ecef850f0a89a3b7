"""A service whose engines have much to say: the real store, journal, controller and API, without engines behind them.

    talker.py FOLDER ENGINES EVENTS_PER_SECOND SECONDS

Each engine goes from one state to the next so many times a second, as it does in an update, for so many seconds from
the first request on that is not for the stream; then it is silent. GET /_said tells the number of the last event.
"""

import asyncio
import gc
import sys
from pathlib import Path

from refitd.api.api import build_api
from refitd.api.context import Service
from refitd.api.server import Server, listening
from refitd.app import SWITCH_SECONDS
from refitd.clock import SystemClock
from refitd.observe.logs import configure_logs
from refitd.settings import Settings
from refitd.state.journal.journal import Journal
from refitd.state.records import EngineRecord
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.update.controller import UpdateController
from refitd.update.targets import Targets
from refitd_client.contract.naming import Order
from refitd_client.contract.states import EngineState, VersionState

TICK = 0.005
WAY = (EngineState.BEHIND, EngineState.UPDATING, EngineState.VERIFYING, EngineState.IN_SYNC)


async def main(folder: Path, engines: int, rate: float, seconds: float) -> None:
    """Serve until SIGTERM."""
    configure_logs("json")
    sys.setswitchinterval(SWITCH_SECONDS)  # as the service does
    journal = Journal(folder / "state")
    store = Store(journal, SystemClock())
    targets = Targets(store)
    settings = Settings(root=folder)
    parts = {"intake": None, "fleet": None, "sweeper": None}  # nobody announces, adds or sweeps
    service = Service(values=settings.api_values, store=store, targets=targets, **parts)  # pyright: ignore[reportArgumentType]
    api = build_api(service)
    begin = asyncio.Event()

    async def said() -> dict[str, int]:
        begin.set()
        await store.durable()
        return {"last": store.last_event}

    api.add_api_route("/_said", said)
    with listening("127.0.0.1", 0) as sockets:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(journal.run())]
            _people(store, engines)
            tasks.append(group.create_task(UpdateController(store, targets, default_run=None, quorum=1).run()))
            tasks.append(group.create_task(_talk(store, engines, rate, seconds, begin)))
            gc.freeze()
            await Server(api, "127.0.0.1", 0).serve(sockets)
            for task in tasks:
                task.cancel()
    journal.close()


def _people(store: Store, engines: int) -> None:
    record = VersionRecord(
        run="bench", order=Order(1, 1), path="bench/v000001", state=VersionState.SEALED, created_at=store.clock.now()
    )
    store.put_version(record, "sealed")
    for number in range(engines):
        name = f"gpu-{number:03d}"
        store.put_engine(EngineRecord(id=name, url=f"http://{name}:30000", run="bench"), "added")


async def _talk(store: Store, engines: int, rate: float, seconds: float, begin: asyncio.Event) -> None:
    await begin.wait()
    loop = asyncio.get_running_loop()
    began, said = loop.time(), 0
    while (now := loop.time()) - began < seconds:
        while said < (now - began) * rate * engines:
            _next(store, f"gpu-{said % engines:03d}", said // engines)
            said += 1
        await asyncio.sleep(TICK)


def _next(store: Store, name: str, turn: int) -> None:
    state = WAY[turn % len(WAY)]
    serving = "bench~v000001" if state is EngineState.IN_SYNC else None
    record = store.engines[name].having(state=state, serving=serving, reason=f"turn {turn}")
    store.put_engine(record, f"{state}: serves {serving}")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])))
