"""Deltas on engines that know none: a real trainer, the whole service, engines that load what lies in the folder."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from refitd.observe.telemetry import Meters
from refitd.observe.traces import Traces
from refitd.policy.roster import move
from refitd_client.contract.states import Kind, VersionState
from refitd_client.publish.ports import Full
from refitd_inside.materialize import materializer as materializing
from refitd_inside.materialize import writing
from support.checkpoints import publish
from support.deltas import Trainer, in_folder, same, training
from support.services import Stage, serving


def shard_in(folder: Path) -> Path:
    """One of them, the same each time."""
    return min(folder.glob("*.safetensors"))


def flip_a_byte(folder: Path) -> None:
    """As a program does that knows no better."""
    shard = shard_in(folder)
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))


@asynccontextmanager
async def followed(tmp_path: Path, **more: Any) -> AsyncIterator[tuple[Stage, Trainer]]:
    """The service, and a trainer whose versions it serves."""
    async with serving(tmp_path, **more) as stage:
        with training(stage.root) as trainer:
            trainer.asks(stage.store, stage.targets)
            yield stage, trainer


async def served(stage: Stage, trainer: Trainer) -> Kind:
    """Publish a step, and wait until engines serve it."""
    publication = await trainer.follow()
    await stage.until(publication.version_id, lambda record: record.served_at is not None)
    return publication.kind


async def log_of(stage: Stage) -> list[str]:
    """What `refitd log` shows."""
    return [event["text"] for event in (await stage.http.get("/v1/log", params={"limit": 500})).json()["items"]]


@asynccontextmanager
async def without_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Stage, Trainer, str]]:
    """A full version is served, and the delta on it was given up: there is no room for its copy."""
    monkeypatch.setattr(writing, "SPARE_BYTES", 2**60)
    monkeypatch.setattr(materializing, "RETRY_SECONDS", 0.1)
    async with followed(folder) as (stage, trainer):
        await served(stage, trainer)
        two = (await trainer.follow()).version_id
        await stage.until(two, lambda _: two in stage.targets.carriage.refused)
        yield stage, trainer, two


async def tried_again(stage: Stage, version: str) -> None:
    """Wait until it is served. Whoever waits for a time to pass looks again when something happens."""
    async with asyncio.timeout(10):
        while stage.store.versions[version].served_at is None:
            stage.store.changed.notify()
            await asyncio.sleep(0.02)


async def test_engines_that_know_no_deltas_follow_a_chain_of_them(tmp_path: Path) -> None:
    """Each loads a plain checkpoint with the very bits that the trainer had, under the delta's label."""
    async with followed(tmp_path) as (stage, trainer):
        kinds = [await served(stage, trainer) for _ in range(6)]
        assert kinds == [Kind.FULL, *[Kind.DELTA] * 5]
        engine = stage.engines["a"]
        assert engine.label == "6"
        assert same(in_folder(engine.path), trainer.weights)
        folders = {path.rpartition("/")[0] for path in engine.loads[1:]}
        assert folders == {str(stage.root / ".refitd/copies/run")}
        names = [path.rpartition("/")[2].partition("-")[0] for path in engine.loads[1:]]
        assert names == [f"v{step:06d}" for step in range(2, 7)]
        await stage.sweep()
        assert list((stage.root / ".refitd/copies/run").iterdir()) == [Path(engine.path)]


async def test_while_an_engine_reads_a_copy_the_next_one_is_made_beside_it(tmp_path: Path) -> None:
    """The newest wins, and what no engine has begun to load is deleted."""
    async with followed(tmp_path, names=("a",)) as (stage, trainer):
        for _ in range(3):
            await served(stage, trainer)
        engine = stage.engines["a"]
        engine.gate = asyncio.Event()  # from here on loads do not end
        four = (await trainer.follow()).version_id
        await stage.until(four, lambda _: len(engine.loads) == 4)
        for _ in range(2):
            newest = (await trainer.follow()).version_id
            await stage.until(newest, lambda _, newest=newest: newest in stage.targets.carriage.carried)
        await stage.sweep()
        left = {path.name.partition("-")[0] for path in (stage.root / ".refitd/copies/run").iterdir()}
        assert left == {"v000003", "v000004", "v000006"}
        assert same(in_folder(engine.loads[-1]), trainer.history[4])
        engine.gate.set()
        await stage.until(newest, lambda record: record.served_at is not None)
        assert same(in_folder(engine.path), trainer.weights)


async def test_the_copy_that_a_delta_is_written_into_is_a_stage_of_its_update_and_is_measured_before_the_load(
    tmp_path: Path,
) -> None:
    async with followed(tmp_path) as (stage, trainer):
        spans = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(spans))
        registry = CollectorRegistry()
        stage.store.observe(Meters(registry), Traces(provider.get_tracer("refitd"), stage.store))
        assert [await served(stage, trainer) for _ in range(2)] == [Kind.FULL, Kind.DELTA]
        took = stage.store.versions["run~v000002"].career.timings["copy"]
        assert registry.get_sample_value("refitd_stage_seconds_count", {"stage": "copy"}) == 1
        assert registry.get_sample_value("refitd_stage_seconds_sum", {"stage": "copy"}) == pytest.approx(took / 1000)
        found = {span.name: span for span in spans.get_finished_spans()}  # of two loads the last
        copy, load, validate = (found[f"refitd.{name}"] for name in ("copy", "load", "validate"))
        assert copy.parent is not None
        assert copy.parent.span_id == found["refitd.version"].context.span_id
        assert (validate.start_time or 0) < (copy.end_time or 0) <= (load.start_time or 0)


async def test_a_delta_that_stands_on_nothing_is_told_and_engines_stay_until_a_full_one_comes(tmp_path: Path) -> None:
    """The trainer hears that a full version is needed, also where it does not wait."""
    async with followed(tmp_path) as (stage, trainer):
        assert [await served(stage, trainer) for _ in range(2)] == [Kind.FULL, Kind.DELTA]
        before = stage.engines["a"].path
        shutil.rmtree(stage.root / "run/v000001")
        await stage.until("run~v000001", lambda record: record.state is VersionState.LOST)
        three = (await trainer.follow()).version_id
        await stage.rejected(three)
        found = (await stage.http.get(f"/v1/versions/{three}/wait")).json()
        assert (found["outcome"], found["version"]["needs_full"]) == ("failed", True)
        assert "of run~v000002, its base run~v000001 is LOST" in found["version"]["reason"]
        assert stage.engines["a"].path == before
        trainer.base = lambda: Full("the service says that a full version is needed")
        assert await served(stage, trainer) is Kind.FULL
        assert same(in_folder(stage.engines["a"].path), trainer.weights)


async def test_where_there_is_no_room_for_a_copy_engines_stay_and_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with without_room(tmp_path, monkeypatch) as (stage, _, two):
        found = (await stage.http.get(f"/v1/versions/{two}")).json()
        assert (found["state"], found["needs_full"]) == ("SEALED", True)
        assert "there is no room for a copy" in found["reason"]
        assert stage.engines["a"].label == "1"
        sentences = (await stage.http.get(f"/v1/explain/{two}")).json()["sentences"]
        assert any("It cannot be carried out: there is no room" in sentence for sentence in sentences)
        monkeypatch.setattr(writing, "SPARE_BYTES", 0)
        await tried_again(stage, two)


async def test_a_delta_that_was_given_up_is_tried_again_when_it_is_rolled_back_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with without_room(tmp_path, monkeypatch) as (stage, trainer, two):
        trainer.base = lambda: Full("there is no room for a copy")
        assert await served(stage, trainer) is Kind.FULL
        monkeypatch.setattr(writing, "SPARE_BYTES", 0)
        await stage.http.post("/v1/rollback", json={"run": "run", "to": two})
        await tried_again(stage, two)
        assert same(in_folder(stage.engines["a"].path), trainer.history[2])


async def test_a_service_that_comes_back_makes_a_copy_anew_before_an_engine_gets_it(tmp_path: Path) -> None:
    """Nothing is known of the folder of an earlier start."""
    async with followed(tmp_path) as (stage, trainer):
        for _ in range(3):
            await served(stage, trainer)
        left, weights = Path(stage.engines["a"].path), trainer.weights
    flip_a_byte(left)
    async with serving(tmp_path) as stage:
        await stage.until("run~v000003", lambda _: stage.engines["a"].label == "3")
        assert Path(stage.engines["a"].path) != left
        assert same(in_folder(stage.engines["a"].path), weights)


async def test_a_copy_that_was_changed_is_made_anew_before_another_engine_gets_it(tmp_path: Path) -> None:
    async with followed(tmp_path, names=("a",)) as (stage, trainer):
        for _ in range(2):
            await served(stage, trainer)
        changed = Path(stage.engines["a"].path)
        flip_a_byte(changed)
        await stage.http.post("/v1/engines/a:1/resync")
        engine = stage.engines["a"]
        await stage.until("run~v000002", lambda _: engine.label == "2" and engine.path != str(changed))
        assert stage.engines["a"].loads.count(str(changed)) == 1, "it was loaded before it was changed, and not again"
        assert same(in_folder(stage.engines["a"].path), trainer.weights)
        assert [text for text in await log_of(stage) if "changed by another program" in text] == [
            f"its copy in {changed.relative_to(stage.root)} was changed by another program: "
            "it is made anew before a load"
        ]


async def test_damage_that_only_the_digests_of_a_copy_show_is_in_the_log(tmp_path: Path) -> None:
    async with followed(tmp_path) as (stage, trainer):
        for _ in range(3):
            await served(stage, trainer)
        source = Path(stage.engines["a"].path)
        shard = shard_in(source)
        times = shard.stat()
        flip_a_byte(source)
        os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
        await served(stage, trainer)
        assert same(in_folder(stage.engines["a"].path), trainer.weights)
        (text,) = [text for text in await log_of(stage) if "is not what it was when it was checked" in text]
        assert text.startswith(shard.name)
        assert text.endswith(f"is made from another than {source.relative_to(stage.root)}")


async def test_copies_of_a_run_that_has_ended_are_taken_away_when_its_engines_follow_another(tmp_path: Path) -> None:
    async with followed(tmp_path) as (stage, trainer):
        for _ in range(3):
            await served(stage, trainer)
        copies = stage.root / ".refitd/copies"
        stage.store.close_run("run")
        await stage.sweep()
        assert [path for path in copies.rglob("*") if path.is_file()], "an engine that restarts is brought back to it"
        move(stage.store, stage.store.engines["a:1"], "next")
        await stage.sweep()
        assert [path for path in copies.rglob("*") if path.is_file()], "the engine serves it still"
        publish(stage.root, "next", 1, trainer.weights)
        await stage.until("next~v000001", lambda record: record.served_at is not None)
        await stage.sweep()
        await stage.sweep()
        assert not [path for path in copies.rglob("*") if path.is_file()]
