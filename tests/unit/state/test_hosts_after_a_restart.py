"""What a hub that was started again makes of the hosts that its journal knows, before they have reported."""

import asyncio
from pathlib import Path

import pytest

from refitd.clock import SystemClock
from refitd.engine.port import Unreached
from refitd.policy.observe import after_probe
from refitd.policy.traffic import is_proven
from refitd.state.journal.journal import Journal
from refitd.state.records import EngineRecord
from refitd.state.store import Store
from refitd_client.contract.states import EngineState
from support.journals import stored
from support.records import engine, version

ONE, TWO = version(1, served_at="t"), version(2)
AWAITED = Unreached(reason="nothing was heard of it since this service started", is_awaited=True)
SILENT = Unreached(reason="the host does not report")


def restarted(folder: Path, *engines: EngineRecord) -> Store:
    """The store of a service that is started again while its journal has these engines."""

    async def write() -> None:
        async with stored(folder) as store:
            for each in engines:
                store.put_engine(each)

    asyncio.run(write())
    return Store(Journal(folder), SystemClock())


def probed(record: EngineRecord, seen: Unreached) -> EngineRecord:
    return after_probe(record, seen, None, TWO.id, 0.0)


def test_a_live_host_that_has_had_no_second_to_report_is_waited_for_and_is_away_after_the_minute(
    tmp_path: Path,
) -> None:
    store = restarted(tmp_path, engine("host-1", pulls=True, serving=ONE.id))
    awaited = probed(store.engines["host-1"], AWAITED)
    there = engine("host-2", pulls=True, serving=TWO.id)
    assert awaited.state is EngineState.PROBING
    assert not is_proven(TWO.id, [awaited, there], 1)
    away = probed(awaited, SILENT)
    assert away.state is EngineState.UNREACHABLE
    assert is_proven(TWO.id, [away, there], 1)
    store.journal.close()


@pytest.mark.parametrize("seen", [AWAITED, SILENT])
def test_a_host_that_was_away_when_the_hub_stopped_delays_nobody(tmp_path: Path, seen: Unreached) -> None:
    store = restarted(tmp_path, engine("host-1", pulls=True, serving=ONE.id, state=EngineState.UNREACHABLE))
    record = store.engines["host-1"]
    assert record.state is probed(record, seen).state is EngineState.UNREACHABLE
    assert "host-1" in store.away_since
    store.journal.close()


def test_an_engine_that_is_called_is_asked_anew(tmp_path: Path) -> None:
    store = restarted(tmp_path, engine("a", state=EngineState.UNREACHABLE))
    assert store.engines["a"].state is EngineState.PROBING
    store.journal.close()
