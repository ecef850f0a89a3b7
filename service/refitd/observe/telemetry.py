"""What the service measures of itself: metrics in one registry, traces, and for how long engines have not arrived."""

import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from refitd.clock import Clock
from refitd.observe.meters import Meters, Stops
from refitd.root.ownership import StartRefusedError
from refitd.state.observer import Observer
from refitd.state.records import UpdateRecord
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import installed_release

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from refitd.observe.traces import Traces


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
        """Return the seconds for which a run's engines have not arrived; 0 where they have, or are paused."""
        if run not in self._since or run not in self._followed_since:
            return 0.0
        return self._clock.monotonic() - max(self._since[run], self._followed_since[run])


_COLLECTORS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


@contextmanager
def tracing() -> Generator["Tracer | None"]:
    """Give a tracer that sends to a collector, None where the environment names none; send what is left at the end.

    Traces go by OTLP over HTTP, in batches, from a thread of the SDK's own. OpenTelemetry reads the endpoint, headers,
    compression and certificates from its own variables
    (https://opentelemetry.io/docs/specs/otel/protocol/exporter/).

    Raises:
        StartRefusedError: OpenTelemetry is not installed.
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
        """Begin at zero, but for the updates that are under way."""
        self.registry = CollectorRegistry(auto_describe=False)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self.meters = Meters(self.registry)
        self.stops = Stops(self.registry)
        self.unserved = Unserved(store.clock, store.runs.followed_since, store.updates.values())
        store.observe(self.meters, self.unserved, _FirstServed(store, self.meters))
        self._traces: Traces | None = None
        if tracer is not None:
            from refitd.observe import traces  # here, because OpenTelemetry is an extra

            self._traces = traces.Traces(tracer, store)
            store.observe(self._traces)

    def close(self) -> None:
        """End the spans that are open: the service stops."""
        if self._traces is not None:
            self._traces.close()


class _FirstServed(Observer):
    """Times whole updates, whose beginning only the store's clock knows."""

    def __init__(self, store: Store, meters: Meters) -> None:
        self._store = store
        self._meters = meters

    def version_changed(self, before: VersionRecord | None, after: VersionRecord) -> None:
        if before is None or before.served_at is not None or after.served_at is None:
            return
        if (milliseconds := self._store.since_seen(after.id)) is not None:
            self._meters.served(after, milliseconds)
