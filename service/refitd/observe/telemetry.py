"""What the service measures of itself: metrics in one registry, traces, and for how long engines have not arrived."""

import asyncio
import gc
import os
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from refitd.clock import Clock
from refitd.engine.port import Outcome, Stage
from refitd.policy.materialize import COPY_STAGE
from refitd.problem import Slug as Problem
from refitd.root.ownership import StartRefusedError
from refitd.state.observer import Observer
from refitd.state.records import NOT_SENT, AttemptRecord, UpdateRecord
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd_client.checkpoint.fault import Code
from refitd_client.contract.naming import installed_release
from refitd_client.contract.states import Kind, VersionState
from refitd_client.contract.wire import Event

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from refitd.observe.traces import Traces


# Metrics that count and time events as they happen. Those read off the store are in `refitd.api.health`. No label grows
# without bound: a version's step is a value, never a label. Every label value that can be foreseen is there from the
# start, at zero, so that `rate()` and `increase()` see the first error as well.


STOP_BUCKETS = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)  # seconds
LAG_LOOK_SECONDS = 0.25


class Stops:
    """What stops everything else: how late the event loop is, and how long garbage collections take."""

    def __init__(self, registry: CollectorRegistry, look_every: float = LAG_LOOK_SECONDS) -> None:
        self._look_every = look_every
        timed = partial(Histogram, buckets=STOP_BUCKETS, registry=registry)
        self._lag = timed(
            "refitd_event_loop_lag_seconds", "How much later than it asked for a task of the event loop went on"
        )
        self._collections = timed(
            "refitd_gc_seconds", "Time for which everything stood still while garbage was collected", ["generation"]
        )
        for generation in range(3):
            self._collections.labels(str(generation))
        self._began = 0.0

    async def run(self) -> None:
        gc.callbacks.append(self._on_garbage)
        try:
            loop = asyncio.get_running_loop()
            while True:
                due = loop.time() + self._look_every
                await asyncio.sleep(self._look_every)
                self._lag.observe(max(0.0, loop.time() - due))
        finally:
            gc.callbacks.remove(self._on_garbage)

    def _on_garbage(self, phase: str, info: dict[str, Any]) -> None:
        # Called in any thread that sets a collection off, and never in two at a time.
        if phase == "start":
            self._began = time.perf_counter()
        elif self._began:
            self._collections.labels(str(info["generation"])).observe(time.perf_counter() - self._began)


STAGES = ("publish", "seen", "validate", COPY_STAGE, *(stage.value for stage in Stage))
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)  # seconds
UNFINISHED = "unfinished"  # given up before there was anything to validate
LOST = "lost"

_BEFORE_LOADS = frozenset({"publish", "seen", "validate", COPY_STAGE})
_OUTCOMES = (*(outcome.name for outcome in Outcome), NOT_SENT)


class Meters(Observer):
    """Histograms and counters, fed by the store and, for problems, by the API. `since_seen` has the milliseconds since
    a version's first sight, None where that was before the start.
    """

    def __init__(self, registry: CollectorRegistry, since_seen: Callable[[str], float | None] = lambda _: None) -> None:
        self._since_seen = since_seen
        timed, counted = partial(Histogram, buckets=BUCKETS, registry=registry), partial(Counter, registry=registry)
        self._stages = timed(
            "refitd_stage_seconds",
            "Time of each stage of an update; from prepare on by engine, of loads that the engine took",
            ["stage"],
        )
        self._updates = timed("refitd_update_seconds", "Time from when a version was first seen until it was served")
        self._loads = counted("refitd_loads", "Loads by how they ended", ["outcome"])
        self._errors = counted("refitd_errors", "What went wrong, by part and reason", ["part", "reason"])
        self._decisions = counted("refitd_decisions", "Entries in the log of decisions", ["kind", "state"])
        self._published = counted("refitd_published_bytes", "Bytes of versions that were found good", ["kind"])
        self._foresee()

    def _foresee(self) -> None:
        for stage in STAGES:
            self._stages.labels(stage)
        for outcome in _OUTCOMES:
            self._loads.labels(_word(outcome))
            if outcome != Outcome.ACK.name:
                self._errors.labels("load", _word(outcome))
        for reason in (*(code.value for code in Code), UNFINISHED, LOST):
            self._errors.labels("version", reason)
        for problem in Problem:
            self._errors.labels("api", problem.slug)
        for kind in (Kind.FULL, Kind.DELTA, Kind.LORA):  # one that is handed over is found good by files of these kinds
            self._published.labels(kind.value)

    def version_changed(self, before: VersionRecord | None, after: VersionRecord) -> None:
        state = None if before is None else before.state
        known = {} if before is None else before.career.timings
        for stage in _BEFORE_LOADS & (after.career.timings.keys() - known.keys()):
            self._stages.labels(stage).observe(after.career.timings[stage] / 1000)
        is_served = before is not None and before.served_at is None and after.served_at is not None
        if is_served and (milliseconds := self._since_seen(after.id)) is not None:
            self._updates.observe(milliseconds / 1000)
        if after.state is state:
            return
        match after.state:
            case VersionState.SEALED if state is not VersionState.LOST:
                self._published.labels(after.kind.value).inc(after.files.bytes or 0)
            case VersionState.REJECTED:
                code = after.verdict.code
                self._errors.labels("version", UNFINISHED if code is None else code.value).inc()
            case VersionState.LOST:
                self._errors.labels("version", LOST).inc()
            case _:
                pass

    def attempt_changed(self, attempt: AttemptRecord) -> None:
        if attempt.outcome is None:
            return
        self._loads.labels(_word(attempt.outcome)).inc()
        if attempt.outcome != Outcome.ACK.name:
            self._errors.labels("load", _word(attempt.outcome)).inc()
            return
        for stage, milliseconds in attempt.timings.items():
            self._stages.labels(stage).observe(milliseconds / 1000)

    def decided(self, event: Event) -> None:
        self._decisions.labels(event.kind, str(event.data.get("state", ""))).inc()

    def refused(self, problem: Problem) -> None:
        self._errors.labels("api", problem.slug).inc()


def _word(outcome: str) -> str:
    return outcome.lower().replace("_", "-")


class Unserved(Observer):
    """For how long the engines of each run have not been where they should be.

    The newest update's age would not do: where a trainer is faster than its engines, each update is superseded before
    it is old, and nothing is ever served. So the clock runs from the first update after the last one that was through.
    A paused update does not count: it waits for an operator. A run that no engine follows counts from when one does
    (`followed_since`).
    """

    def __init__(self, clock: Clock, followed_since: Mapping[str, float], updates: Iterable[UpdateRecord] = ()) -> None:
        """Begin with the journal's updates: those that were under way at the last stop count from now."""
        self._clock = clock
        self._followed_since = followed_since
        self._since: dict[str, float] = {}
        for update in updates:
            self.update_changed(update)

    def update_changed(self, update: UpdateRecord) -> None:
        if update.state.is_proven or update.paused_since is not None:
            self._since.pop(update.run, None)
        else:
            self._since.setdefault(update.run, self._clock.monotonic())

    def seconds(self, run: str) -> float:
        """For how long a run's engines have not arrived; 0 where they have, or are paused."""
        if run not in self._since or run not in self._followed_since:
            return 0.0
        return self._clock.monotonic() - max(self._since[run], self._followed_since[run])


_COLLECTORS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


@contextmanager
def tracing() -> Generator["Tracer | None"]:
    """Give a tracer that sends to a collector, None where the environment names none; send what is left at the end.

    Traces go by OTLP over HTTP, in batches, from a thread of the SDK's own. OpenTelemetry reads the endpoint, headers,
    compression and certificates from its own variables
    (https://opentelemetry.io/docs/specs/otel/protocol/exporter/). Where it is not installed, the start is refused.
    """
    named = [name for name in _COLLECTORS if os.environ.get(name)]
    if not named:
        yield None
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise StartRefusedError(f"{named[0]} needs OpenTelemetry: refitd's extra 'otel' brings it") from error

    release = installed_release()
    provider = TracerProvider(resource=Resource.create({"service.name": "refitd", "service.version": release}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    try:
        yield provider.get_tracer("refitd", release)
    finally:
        provider.shutdown()


disable_created_metrics()  # twice as many series, for times that are not needed


class Telemetry:
    """Listens to a store from here on. `registry` is what /metrics shows; with a tracer, versions are traced."""

    def __init__(self, store: Store, tracer: "Tracer | None" = None) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self.meters = Meters(self.registry, store.since_seen)
        self.stops = Stops(self.registry)
        self.unserved = Unserved(store.clock, store.runs.followed_since, store.updates.values())
        store.observe(self.meters, self.unserved)
        self._traces: Traces | None = None
        if tracer is not None:
            from refitd.observe import traces  # here, because OpenTelemetry is an extra

            self._traces = traces.Traces(tracer, store)
            store.observe(self._traces)

    def close(self) -> None:
        if self._traces is not None:
            self._traces.close()
