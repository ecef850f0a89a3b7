"""Engines with the plugin make a version ready while the service still reads it; the load waits for both."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from refitd.catalog import catalog, files
from refitd.policy.goals import coming, looks_ahead
from refitd.policy.strategy import Strategy, StrategyName
from refitd.state.records import EngineRecord
from refitd_client.contract.states import EngineState, Kind, VersionState
from support.checkpoints import publish, tensors
from support.records import engine, version
from support.services import Stage, serving
from support.simulated_engine import SimulatedEngine

SERVED = version(1, served_at="2026-01-01T00:00:00Z")
COMING = version(2, state=VersionState.VALIDATING)
DELTA = version(2, state=VersionState.VALIDATING, kind=Kind.DELTA, base=SERVED.id)
PLUGGED = engine(plugin="0.1.0", configuration="x", serving=SERVED.id)


def looks(record: EngineRecord = PLUGGED, wanted: Any = COMING, *, paused: bool = False) -> bool:
    versions = {each.id: each for each in (SERVED, wanted)}
    return looks_ahead(record, wanted, versions, Strategy(), paused=paused)


def test_the_newest_version_is_coming_while_it_waits_for_its_verdict() -> None:
    assert coming([COMING, SERVED], [PLUGGED]) == COMING.id
    announced = replace(COMING, state=VersionState.ANNOUNCED)
    assert coming([announced, SERVED], [PLUGGED]) is None  # found by a scan: nobody knows yet whether it is all there
    assert coming([announced.having(noticed=True), SERVED], [PLUGGED]) == announced.id


@pytest.mark.parametrize(
    "not_so", [{"state": VersionState.SEALED}, {"state": VersionState.REJECTED}, {"barred": True}, {"handed": True}]
)
def test_what_has_its_verdict_or_no_files_yet_is_not_coming(not_so: dict[str, Any]) -> None:
    assert coming([COMING.having(**not_so), SERVED], [PLUGGED]) is None


def test_where_no_engine_has_the_plugin_nothing_is_coming() -> None:
    assert coming([COMING, SERVED], [PLUGGED.having(plugin=None)]) is None


def test_an_engine_looks_ahead_at_what_it_would_be_brought_to() -> None:
    assert looks()
    assert looks(wanted=DELTA)
    assert not looks(PLUGGED.having(serving=None), DELTA)  # it would be given the full version first
    assert not looks(PLUGGED.having(serving=COMING.id))


@pytest.mark.parametrize(
    "unfit", [{"plugin": None}, {"known": False}, {"state": EngineState.TAINTED}, {"state": EngineState.UNREACHABLE}]
)
def test_an_engine_that_cannot_be_asked_or_is_to_be_repaired_does_not(unfit: dict[str, Any]) -> None:
    assert not looks(PLUGGED.having(**unfit))


def test_where_engines_go_in_turns_or_stay_where_they_are_none_does() -> None:
    assert not looks(paused=True)
    versions = {each.id: each for each in (SERVED, COMING)}
    for name in (StrategyName.ROLLING, StrategyName.CANARY):
        assert not looks_ahead(PLUGGED, COMING, versions, Strategy(name=name), paused=False)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """Whoever reads a version to its end waits here first."""
    opened, original = Event(), files.examine

    def examine(*args: Any, **more: Any) -> Any:
        assert opened.wait(10)
        return original(*args, **more)

    monkeypatch.setattr(files, "examine", examine)
    yield opened
    opened.set()


async def until(stage: Stage, what: Callable[[], bool]) -> None:
    seen = stage.store.changed.count
    async with asyncio.timeout(10):
        while not what():
            seen = await stage.store.changed.wait_after(seen, within=0.02)


@asynccontextmanager
async def plugged(tmp_path: Path) -> AsyncIterator[tuple[Stage, SimulatedEngine]]:
    async with serving(tmp_path, names=("a",)) as stage:
        stage.engines["a"].plugin = "0.1.0"
        await until(stage, lambda: all(each.seen.plugin is not None for each in stage.store.engines.values()))
        yield stage, stage.engines["a"]


async def announce(stage: Stage, step: int, **weights: Any) -> str:
    publish(stage.root, "run", step, tensors(step) | weights)
    reply = await stage.http.post("/v1/versions", json={"run": "run", "step": step})
    return str(reply.json()["id"])


async def test_an_engine_makes_a_version_ready_before_its_verdict_and_loads_it_after(
    tmp_path: Path, gate: Event
) -> None:
    async with plugged(tmp_path) as (stage, sglang):
        id_ = await announce(stage, 1)
        await until(stage, lambda: sglang.ahead == [id_])
        assert (sglang.loads, stage.store.versions[id_].state.is_open) == ([], True)
        gate.set()
        await stage.until(id_, lambda record: record.served_at is not None)
        assert (sglang.ahead, len(sglang.loads)) == ([id_], 1)


async def test_what_changed_before_its_load_is_let_go_of(
    tmp_path: Path, gate: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict was good, and no load comes of it."""
    original = catalog.FileChecks.check

    async def rewritten(self: Any, record: Any) -> bool:
        (tmp_path / "root" / record.path / "model.safetensors.index.json").write_text("{}")
        return await original(self, record)

    monkeypatch.setattr(catalog.FileChecks, "check", rewritten)
    async with plugged(tmp_path) as (stage, sglang):
        id_ = await announce(stage, 1)
        await until(stage, lambda: sglang.ahead == [id_])
        gate.set()
        await stage.until(id_, lambda record: record.state is VersionState.LOST)
        await until(stage, lambda: sglang.ahead == [id_, None])
        assert sglang.loads == []


async def test_a_look_ahead_that_hangs_holds_up_no_older_version(tmp_path: Path, gate: Event) -> None:
    """Nor a rollback, an offer or a resume: whatever is to be done comes first."""
    async with plugged(tmp_path) as (stage, sglang):
        gate.set()
        one = await announce(stage, 1)
        await stage.until(one, lambda record: record.served_at is not None)
        gate.clear()
        sglang.hangs = True
        two = await announce(stage, 2)
        await until(stage, lambda: sglang.ahead[-1] == two)
        engine = next(iter(stage.store.engines.values()))
        assert (await stage.http.post(f"/v1/engines/{engine.id}/resync")).status_code == 202
        await until(stage, lambda: len(sglang.loads) == 2)
        assert stage.store.versions[two].state.is_open


async def test_what_turns_out_to_be_bad_is_let_go_of_and_never_loaded(tmp_path: Path, gate: Event) -> None:
    async with plugged(tmp_path) as (stage, sglang):
        name, tensor = next(iter(tensors(1).items()))
        id_ = await announce(stage, 1, **{name: tensor * float("nan")})
        await until(stage, lambda: sglang.ahead == [id_])
        gate.set()
        await stage.rejected(id_)
        await until(stage, lambda: sglang.ahead == [id_, None])
        assert sglang.loads == []
