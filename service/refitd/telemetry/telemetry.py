"""Everything that the service measures of itself, in one registry."""

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from refitd.catalog.record import VersionRecord
from refitd.ledger import Ledger
from refitd.telemetry.meters import Meters
from refitd.telemetry.stops import Stops
from refitd.telemetry.unserved import Unserved
from refitd.telemetry.witness import Silent

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from refitd.telemetry.traces import Traces

disable_created_metrics()  # twice as many series, for a time that nobody asks about


class Telemetry:
    """Listens to a ledger from here on. `registry` is what /metrics shows; with a tracer, versions are traced."""

    def __init__(self, ledger: Ledger, tracer: "Tracer | None" = None) -> None:
        """Begin at zero, but for what is on its way already."""
        self.registry = CollectorRegistry(auto_describe=False)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self.meters = Meters(self.registry)
        self.stops = Stops(self.registry)
        self.unserved = Unserved(ledger.clock, ledger.runs.followed_since, ledger.rollouts.values())
        ledger.witnesses += [self.meters, self.unserved, _FirstServed(ledger, self.meters)]
        self._traces = None if tracer is None else _traces(tracer, ledger)
        if self._traces is not None:
            ledger.witnesses.append(self._traces)

    def close(self) -> None:
        """End what is open: the service stops."""
        if self._traces is not None:
            self._traces.close()


class _FirstServed(Silent):
    """Times whole updates, which only the ledger's clock knows the beginning of."""

    def __init__(self, ledger: Ledger, meters: Meters) -> None:
        self._ledger = ledger
        self._meters = meters

    def version_changed(self, before: VersionRecord | None, after: VersionRecord) -> None:
        """See `Witness`."""
        if before is None or before.served_at is not None or after.served_at is None:
            return
        if (milliseconds := self._ledger.since_seen(after.id)) is not None:
            self._meters.served(milliseconds)


def _traces(tracer: "Tracer", ledger: Ledger) -> "Traces":
    """Here, because OpenTelemetry need not be there where nobody traces."""
    from refitd.telemetry.traces import Traces

    return Traces(tracer, ledger)
