"""Everything that the service measures of itself, in one registry."""

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

disable_created_metrics()  # twice as many series, for a time that nobody asks about


class Telemetry:
    """Listens to a ledger from here on. `registry` is what /metrics shows."""

    def __init__(self, ledger: Ledger) -> None:
        """Begin at zero, but for what is on its way already."""
        self.registry = CollectorRegistry(auto_describe=False)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self.meters = Meters(self.registry)
        self.stops = Stops(self.registry)
        self.unserved = Unserved(ledger.clock, ledger.rollouts.values())
        ledger.witnesses += [self.meters, self.unserved, _FirstServed(ledger, self.meters)]


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
