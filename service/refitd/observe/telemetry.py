"""Everything that the service measures of itself, in one registry."""

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from refitd.observe.meters import Meters
from refitd.observe.stops import Stops
from refitd.observe.unserved import Unserved
from refitd.state.observer import SilentObserver
from refitd.state.store import Store
from refitd.state.version import VersionRecord

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from refitd.observe.traces import Traces

disable_created_metrics()  # twice as many series, for a time that nobody asks about


class Telemetry:
    """Listens to a store from here on. `registry` is what /metrics shows; with a tracer, versions are traced."""

    def __init__(self, store: Store, tracer: "Tracer | None" = None) -> None:
        """Begin at zero, but for what is on its way already."""
        self.registry = CollectorRegistry(auto_describe=False)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self.meters = Meters(self.registry)
        self.stops = Stops(self.registry)
        self.unserved = Unserved(store.clock, store.runs.followed_since, store.rollouts.values())
        store.observe(self.meters, self.unserved, _FirstServed(store, self.meters))
        self._traces = None if tracer is None else _traces(tracer, store)
        if self._traces is not None:
            store.observe(self._traces)

    def close(self) -> None:
        """End what is open: the service stops."""
        if self._traces is not None:
            self._traces.close()


class _FirstServed(SilentObserver):
    """Times whole updates, which only the store's clock knows the beginning of."""

    def __init__(self, store: Store, meters: Meters) -> None:
        self._store = store
        self._meters = meters

    def version_changed(self, before: VersionRecord | None, after: VersionRecord) -> None:
        """See `Observer`."""
        if before is None or before.served_at is not None or after.served_at is None:
            return
        if (milliseconds := self._store.since_seen(after.id)) is not None:
            self._meters.served(milliseconds)


def _traces(tracer: "Tracer", store: Store) -> "Traces":
    """Here, because OpenTelemetry need not be there where nobody traces."""
    from refitd.observe.traces import Traces

    return Traces(tracer, store)
