"""What /metrics tells: of each update, of what goes wrong, and of nothing without end."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from refitd.observe.telemetry import STAGES, Unserved
from refitd.state.records import UpdateRecord
from refitd_client.contract.states import UpdateState, VersionState
from support.checkpoints import publish, tensors
from support.services import Stage, serving


class Scrape:
    """One answer of /metrics."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self.samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in families
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        return self.samples[name, tuple(sorted(labels.items()))]


async def scrape(stage: Stage) -> Scrape:
    answer = await stage.http.get("/metrics")
    assert answer.status_code == 200
    return Scrape(text_string_to_metric_families(answer.text))


async def test_every_stage_of_an_update_is_timed_once(tmp_path: Path) -> None:
    async with serving(tmp_path, names=("a", "b")) as stage:
        timings = dict.fromkeys(("prepare", "pause", "load", "verify", "resume"), 10.0)
        for engine in stage.engines.values():
            engine.timings = timings
        publish(stage.root, "run", 1, tensors(1))
        await stage.http.post("/v1/versions", json={"run": "run", "step": 1, "publish_ms": 12.5})
        await stage.until("run~v000001", lambda record: record.served_at is not None)
        found = await scrape(stage)
        by_version = {"publish": 1, "seen": 1, "validate": 1, "copy": 0}
        for name, count in (dict.fromkeys(STAGES, 2) | by_version).items():
            assert found.value("refitd_stage_seconds_count", stage=name) == count, name
        assert found.value("refitd_stage_seconds_sum", stage="publish") == 0.0125
        assert found.value("refitd_stage_seconds_sum", stage="load") == 0.02
        assert found.value("refitd_update_seconds_count") == 1
        assert found.value("refitd_loads_total", outcome="ack") == 2
        published = stage.store.versions["run~v000001"].files.bytes
        assert found.value("refitd_published_bytes_total", kind="full") == published


async def test_what_is_rejected_lost_or_refused_is_counted_by_reason(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        weights = tensors(1)
        del weights["layer.1.weight"]
        publish(stage.root, "run", 1, weights)
        await stage.rejected("run~v000001")
        assert (await stage.http.get("/v1/versions/none")).status_code == 404
        found = await scrape(stage)
        assert found.value("refitd_errors_total", part="version", reason="missing-tensor") == 1
        assert found.value("refitd_errors_total", part="api", reason="unknown-version") == 1
        assert found.value("refitd_decisions_total", kind="version", state="REJECTED") == 1


async def test_errors_are_there_at_zero_and_a_request_that_the_gate_turns_away_is_one(tmp_path: Path) -> None:
    async with serving(tmp_path, token="right") as stage:
        await stage.http.post("/v1/reclaim")
        found = await scrape(stage)
        assert found.value("refitd_errors_total", part="api", reason="unauthorized") == 1
        for part, reason in (("load", "tainted"), ("version", "torn-file"), ("version", "lost"), ("api", "internal")):
            assert found.value("refitd_errors_total", part=part, reason=reason) == 0


async def test_staleness_is_told_by_run_and_engine(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await stage.served(1)
        assert (await scrape(stage)).value("refitd_staleness_steps", run="run", engine="a:1") == 0
        stage.engines["a"].gate = asyncio.Event()
        publish(stage.root, "run", 4, tensors(4))
        await stage.until("run~v000004", lambda record: record.state is VersionState.SEALED)
        await asyncio.sleep(0.01)
        found = await scrape(stage)
        assert found.value("refitd_staleness_steps", run="run", engine="a:1") == 3
        assert found.value("refitd_target_step", run="run") == 4
        assert found.value("refitd_unserved_seconds", run="run") > 0
        stage.engines["a"].gate.set()


class Hands:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.time = 0.0

    def monotonic(self) -> float:
        return self.time

    def now(self) -> str:
        return ""


def test_a_trainer_that_is_faster_than_its_engines_does_not_hide_that_nothing_is_served() -> None:
    clock = Hands()
    unserved = Unserved(clock, {"run": 0})
    for number in range(1, 11):
        update = UpdateRecord(number=number, run="run", version=f"run~v{number:06d}", cause="", started_at="")
        unserved.update_changed(update)
        clock.time += 60
        unserved.update_changed(replace(update, state=UpdateState.SUPERSEDED))
    assert unserved.seconds("run") == 600
    last = UpdateRecord(number=11, run="run", version="run~v000011", cause="", started_at="")
    unserved.update_changed(replace(last, paused_since="2026-01-01T00:00:00Z"))
    assert unserved.seconds("run") == 0
    unserved.update_changed(last)
    clock.time += 5
    assert unserved.seconds("run") == 5
    unserved.update_changed(replace(last, state=UpdateState.DEGRADED))
    assert unserved.seconds("run") == 0


async def test_a_journal_that_cannot_be_written_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as stage:
        await stage.served(1)
        assert (await scrape(stage)).value("refitd_fault", part="journal") == 0
        monkeypatch.setattr(stage.store.journal, "_failure", OSError("disk full"))
        assert (await scrape(stage)).value("refitd_fault", part="journal") == 1
        monkeypatch.undo()
