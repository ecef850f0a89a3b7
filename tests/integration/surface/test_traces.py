"""One trace for each version: from the trainer's publish through the notice to each engine's resume."""

import asyncio
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from refitd.engine.port import Outcome, Refit
from refitd.observe.traces import Traces
from refitd_client import WeightPublisher
from refitd_client.contract.manifest import parse_manifest
from support.checkpoints import publish, tensors
from support.services import Stage, serving

LOADED = {"prepare": 3.0, "pause": 2.0, "load": 40.0, "verify": 5.0, "resume": 1.0}


class Collector:
    """What was traced, in memory."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def watch(self, stage: Stage) -> None:
        stage.store.observe(Traces(self.provider.get_tracer("refitd"), stage.store))

    @property
    def spans(self) -> list[ReadableSpan]:
        """But for those that FastAPI makes of requests where the process traces, as a trainer's does."""
        return [span for span in self._exporter.get_finished_spans() if span.name.startswith("refitd.")]

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == f"refitd.{name}"]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span

    def children(self, span: ReadableSpan) -> list[ReadableSpan]:
        return [each for each in self.spans if each.parent and each.parent.span_id == span.context.span_id]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Collector:
    """The trainer's provider is the process's own one, for the length of the test."""
    found = Collector()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", found.provider)
    return found


@pytest.mark.parametrize("noticed", [True, False])
async def test_one_trace_leads_from_the_first_byte_to_every_engines_resume(
    tmp_path: Path, collector: Collector, noticed: bool
) -> None:
    """Also of a version that nobody announced: its manifest says which trace it belongs to."""
    async with serving(tmp_path, names=("a", "b")) as stage:
        collector.watch(stage)
        for engine in stage.engines.values():
            engine.timings = LOADED
        with WeightPublisher(stage.root, "run") as publisher:
            publication = await asyncio.to_thread(publisher.publish, tensors(1), step=1)
        if noticed:
            body = {"run": "run", "step": 1, "metadata": publication.notice.metadata}
            assert (await stage.http.post("/v1/versions", json=body)).status_code in {200, 202}
        await stage.until("run~v000001", lambda record: record.served_at is not None)
    assert len({span.context.trace_id for span in collector.spans}) == 1
    published, seen = collector.one("publish"), collector.one("version")
    assert seen.parent is not None
    assert seen.parent.span_id == published.context.span_id
    assert {span.name for span in collector.children(published)} == {"refitd.notice", "refitd.version"}
    loads = collector.named("load")
    assert {str((load.attributes or {})["refitd.engine"]) for load in loads} == {"a:1", "b:1"}
    assert {span.name for span in collector.children(seen)} == {"refitd.seen", "refitd.validate", "refitd.load"}
    for load in loads:
        stages = sorted(collector.children(load), key=lambda span: span.start_time or 0)
        assert [span.name.removeprefix("refitd.") for span in stages] == [
            "prepare", "pause", "load-weights", "verify", "resume"
        ]  # fmt: skip
        assert [((span.end_time or 0) - (span.start_time or 0)) / 1e6 for span in stages] == [*LOADED.values()]
    assert (seen.attributes or {})["refitd.outcome"] == "served"


async def test_a_trainer_that_does_not_trace_leaves_no_mark_and_the_service_traces_alone(tmp_path: Path) -> None:
    collector = Collector()
    async with serving(tmp_path) as stage:
        collector.watch(stage)
        with WeightPublisher(stage.root, "run") as publisher:
            path = (await asyncio.to_thread(publisher.publish, tensors(1), step=1)).path
        assert parse_manifest((path / "refit.json").read_bytes()).metadata == {}
        await stage.http.post("/v1/versions", json={"run": "run", "step": 1, "publish_ms": 30})
        await stage.until("run~v000001", lambda record: record.served_at is not None)
        await stage.served(2)
    assert len({span.context.trace_id for span in collector.spans}) == 2
    first = collector.named("version")[0]
    assert first.parent is None


async def test_what_failed_is_an_error_in_its_trace(tmp_path: Path, collector: Collector) -> None:
    async with serving(tmp_path) as stage:
        collector.watch(stage)
        stage.engines["a"].script.append(Refit(outcome=Outcome.NACK, resumed=True, reason="no room"))
        await stage.served(1)
        weights = tensors(2)
        del weights["layer.1.weight"]
        publish(stage.root, "run", 2, weights)
        await stage.rejected("run~v000002")
    refused, taken = collector.named("load")
    assert (refused.status.is_ok, refused.status.description, taken.status.is_ok) == (False, "no room", True)
    bad = collector.named("version")[-1]
    assert (bad.attributes or {})["refitd.reason"] == "missing-tensor"
    assert not bad.status.is_ok
