"""Deltas in engines with the plugin: given as they are, a copy beside them for others, and where one is needed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from refitd.engine.port import Outcome, Refit
from refitd.policy.chain import needs_copy, step_in_place, takes_in_place
from refitd.policy.strategy import Strategy, StrategyName
from refitd.reclaim.books import Books
from refitd.state.records import EngineRecord
from refitd.state.version import VersionRecord
from refitd_client.contract.states import Kind, VersionState
from refitd_client.publish.ports import Full
from support.deltas import Trainer, training
from support.fleets import running as fleet
from support.records import engine, version
from support.services import Stage, serving
from support.simulated_engine import SimulatedEngine

FULL, SECOND, THIRD, FOURTH = (
    version(1),
    version(2, kind=Kind.DELTA, base="run~v000001"),
    version(3, kind=Kind.DELTA, base="run~v000002"),
    version(4, kind=Kind.DELTA, base="run~v000002"),
)
VERSIONS = {each.id: each for each in (FULL, SECOND, THIRD, FOURTH)}


def plugged(serving: VersionRecord | None = FULL, **more: Any) -> EngineRecord:
    known = {"plugin": "0.1.0", "configuration": "x", "serving": None if serving is None else serving.id}
    return engine(**(known | more))


@pytest.mark.parametrize(
    ("holds", "wanted", "step"),
    [
        (FULL, SECOND, SECOND),
        (FULL, THIRD, SECOND),
        (SECOND, FOURTH, FOURTH),
        (THIRD, FOURTH, FOURTH),  # it lists all that changed since the second, and so since the third
        (None, THIRD, FULL),
        (FOURTH, FOURTH, None),
        (FOURTH, THIRD, None),
        (SECOND, FULL, None),
    ],
)
def test_an_engine_goes_from_what_it_serves_to_a_delta_step_by_step(
    holds: VersionRecord | None, wanted: VersionRecord, step: VersionRecord | None
) -> None:
    assert step_in_place(plugged(holds), wanted, VERSIONS) == step
    assert takes_in_place(plugged(holds), wanted, VERSIONS) == (step == wanted)


def test_a_delta_is_never_written_into_what_an_engine_serves_of_the_run_that_it_was_moved_from() -> None:
    old = version(1, run="old")
    moved, versions = plugged(old), VERSIONS | {old.id: old}
    assert not takes_in_place(moved, SECOND, versions)
    assert step_in_place(moved, SECOND, versions) == FULL, "the full version comes first"


def test_no_engine_gets_to_a_delta_by_what_was_rolled_back_from() -> None:
    versions = VERSIONS | {SECOND.id: SECOND.having(barred=True)}
    assert step_in_place(plugged(FULL), THIRD, versions) is None
    assert needs_copy(plugged(FULL), THIRD, versions)


@pytest.mark.parametrize("more", [{"plugin": None}, {"known": False}, {"wants_full": True}])
def test_an_engine_that_takes_no_deltas_needs_a_copy(more: dict[str, Any]) -> None:
    assert not takes_in_place(plugged(**more), SECOND, VERSIONS)
    assert needs_copy(plugged(**more), SECOND, VERSIONS)
    assert not needs_copy(plugged(), SECOND, VERSIONS)


@pytest.mark.parametrize("holder", [plugged(SECOND, plugin=None), plugged(None, plugin=None, configuration=None)])
def test_who_serves_it_or_was_never_reached_needs_no_copy(holder: EngineRecord) -> None:
    assert not needs_copy(holder, SECOND, VERSIONS)


def test_an_engine_that_took_something_newer_from_memory_needs_no_copy_of_an_older_delta() -> None:
    """It would be 3 GB of work beside the next hand-overs, for nobody."""
    newer = version(9, handed=True, state=VersionState.ANNOUNCED)
    versions = VERSIONS | {newer.id: newer}
    assert not needs_copy(plugged(newer), THIRD, versions)
    assert needs_copy(plugged(newer), THIRD, versions | {newer.id: newer.having(barred=True)})
    assert needs_copy(plugged(newer, known=False), THIRD, versions)


@pytest.mark.parametrize("more", [{}, {"plugin": None}])
def test_an_engine_that_serves_something_newer_needs_a_copy_of_an_older_delta_that_an_upstream_orders(
    more: dict[str, Any],
) -> None:
    newer = version(9)
    versions = VERSIONS | {newer.id: newer}
    assert needs_copy(plugged(newer, **more), THIRD, versions, ordered=True)
    assert not needs_copy(plugged(THIRD, **more), THIRD, versions, ordered=True)


@asynccontextmanager
async def followed(tmp_path: Path, *with_plugin: str, **more: Any) -> AsyncIterator[tuple[Stage, Trainer]]:
    """The service, and a trainer whose versions it serves."""
    async with serving(tmp_path, **more) as stage:
        for name in with_plugin:
            stage.engines[name].plugin = "0.1.0"
        await until(stage, lambda: all(record(stage, name).seen.plugin for name in with_plugin))
        with training(stage.root) as trainer:
            trainer.asks(stage.store, stage.targets)
            yield stage, trainer


async def until(stage: Stage, what: Any) -> None:
    seen = stage.store.changed.count
    while not what():
        seen = await stage.store.changed.wait_after(seen, within=0.02)


def record(stage: Stage, name: str) -> EngineRecord:
    return next(each for each in stage.store.engines.values() if each.id.startswith(name))


async def served(stage: Stage, trainer: Trainer) -> Kind:
    publication = await trainer.follow()
    await stage.until(publication.version_id, lambda version: version.served_at is not None)
    return publication.kind


def steps(stage: Stage, name: str) -> list[str]:
    """What it was given, by folder."""
    return [path.removeprefix(f"{stage.root}/") for path in stage.engines[name].loads]


async def test_with_the_plugin_a_delta_is_given_as_it_is_and_others_get_a_copy_in_the_same_update(
    tmp_path: Path,
) -> None:
    async with followed(tmp_path, "a", names=("a", "b")) as (stage, trainer):
        kinds = [await served(stage, trainer) for _ in range(3)]
        assert kinds == [Kind.FULL, Kind.DELTA, Kind.DELTA]
        assert steps(stage, "a") == ["run/v000001", "run/v000002", "run/v000003"]
        assert steps(stage, "b")[0] == "run/v000001"
        assert all(path.startswith(".refitd/copies/run/") for path in steps(stage, "b")[1:])
        assert [record(stage, name).serving for name in "ab"] == ["run~v000003"] * 2


async def test_where_all_have_the_plugin_no_copy_is_written(tmp_path: Path) -> None:
    async with followed(tmp_path, "a", names=("a",)) as (stage, trainer):
        for _ in range(3):
            await served(stage, trainer)
        assert not (stage.root / ".refitd" / "copies").exists()
        (view,) = Books(stage.store, stage.targets, None).views().engines  # type: ignore[arg-type]
        assert (view.serving, view.beneath) == ("run~v000003", "run~v000001")
        await stage.sweep()
        assert {path.name for path in (stage.root / "run").glob("v*")} == {"v000001", "v000002", "v000003"}


@pytest.mark.parametrize("name", StrategyName)
async def test_an_engine_that_gets_to_a_delta_by_steps_gets_there_by_every_strategy(
    tmp_path: Path, name: StrategyName
) -> None:
    """A canary that has only got to what the delta stands on is not stuck there."""
    simulated = SimulatedEngine()
    simulated.plugin = "0.1.0"
    async with fleet(tmp_path, {"a": simulated}, strategy=Strategy(name=name)) as stage:
        stage.store.put_version(FULL)
        await stage.until(lambda: stage.store.versions[FULL.id].served_at is not None)
        full, delta = version(2), version(3, kind=Kind.DELTA, base="run~v000002")
        for each in (full, delta):
            stage.store.put_version(each)
        await stage.until(lambda: stage.store.versions[delta.id].served_at is not None)
        assert [path.rpartition("/")[2] for path in simulated.loads] == ["v000001", "v000002", "v000003"]


async def test_an_engine_that_needs_a_full_version_gets_a_copy_until_it_was_given_one(tmp_path: Path) -> None:
    async with followed(tmp_path, "a", names=("a",)) as (stage, trainer):
        await served(stage, trainer)
        no = Refit(outcome=Outcome.NACK, resumed=True, reason="load a full version", needs_full=True)
        stage.engines["a"].script = [no]
        await served(stage, trainer)
        assert (record(stage, "a").contents.wants_full, record(stage, "a").trouble.failures) == (True, 0)
        await served(stage, trainer)
        tried, *copies = steps(stage, "a")[1:]
        assert tried == "run/v000002"
        assert [path.startswith(".refitd/copies/run/") for path in copies] == [True, True]
        trainer.base = lambda: Full("the test asks for one")
        assert await served(stage, trainer) is Kind.FULL
        assert not record(stage, "a").contents.wants_full


async def test_an_engine_that_was_restarted_is_brought_back_by_the_full_version_and_the_deltas_on_it(
    tmp_path: Path,
) -> None:
    async with followed(tmp_path, "a", names=("a",)) as (stage, trainer):
        for _ in range(3):
            await served(stage, trainer)
        engine_a = stage.engines["a"]
        engine_a.restart()
        engine_a.loads.clear()
        await until(stage, lambda: len(engine_a.loads) == 3 and record(stage, "a").serving == "run~v000003")
        assert steps(stage, "a") == ["run/v000001", "run/v000002", "run/v000003"]


@pytest.mark.parametrize("plugin", ["0.1.0", None])
async def test_an_engine_that_restarts_while_updates_are_paused_is_brought_back_to_the_last_delta_that_was_served(
    tmp_path: Path, plugin: str | None
) -> None:
    """By steps where it has the plugin, else by a copy of what nobody needed a copy of before; and no further."""
    async with followed(tmp_path, "a", names=("a",)) as (stage, trainer):
        for _ in range(3):
            await served(stage, trainer)
        answer = await stage.http.post("/v1/runs", json={"run": "run", "paused": True})
        assert answer.status_code == 200
        four = (await trainer.follow()).version_id
        await stage.until(four, lambda version: version.state is VersionState.SEALED)
        engine_a = stage.engines["a"]
        engine_a.restart()
        engine_a.loads.clear()
        engine_a.plugin = plugin
        async with asyncio.timeout(10):
            await until(stage, lambda: engine_a.label == "3" and record(stage, "a").serving == "run~v000003")
        if plugin is not None:
            assert steps(stage, "a") == ["run/v000001", "run/v000002", "run/v000003"]
        assert engine_a.label == "3"
        assert (await stage.http.post("/v1/runs", json={"run": "run", "paused": False})).status_code == 200
        await stage.until(four, lambda version: version.served_at is not None)
