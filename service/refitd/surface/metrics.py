"""Metrics by Prometheus conventions, read from the ledger when they are asked for. No label grows without bound."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from refitd.ledger import Ledger
from refitd.surface.present import steps_behind
from refitd_client.contract.states import EngineState, VersionState


class LedgerCollector(Collector):
    """Turns the ledger into metrics."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def collect(self) -> Iterator[Metric]:
        """Yield every metric as it is now."""
        yield self._versions()
        yield self._engines()
        yield self._staleness()
        held = sum(version.bytes or 0 for version in self._ledger.versions.values())
        yield GaugeMetricFamily("refitd_held_bytes", "Bytes of versions on disk", value=held)
        skipped = sum(engine.skipped for engine in self._ledger.engines.values())
        yield CounterMetricFamily("refitd_skipped_versions", "Good versions that engines passed over", value=skipped)
        yield CounterMetricFamily("refitd_events", "Entries in the log of decisions", value=self._ledger.last_event)

    def _versions(self) -> Metric:
        family = GaugeMetricFamily("refitd_versions", "Versions by state", labels=["state"])
        counts = Counter(version.state for version in self._ledger.versions.values())
        counts[VersionState.DELETED] = len(self._ledger.gone)
        for state in VersionState:
            family.add_metric([state.value], counts[state])
        return family

    def _engines(self) -> Metric:
        family = GaugeMetricFamily("refitd_engines", "Engines by state", labels=["state"])
        counts = Counter(engine.state for engine in self._ledger.engines.values())
        for state in EngineState:
            family.add_metric([state.value], counts[state])
        return family

    def _staleness(self) -> Metric:
        family = GaugeMetricFamily("refitd_staleness_steps", "Steps behind the run's target", labels=["engine"])
        for engine in self._ledger.engines.values():
            if (behind := steps_behind(engine, self._ledger)) is not None:
                family.add_metric([engine.id], behind)
        return family


def registry_of(ledger: Ledger) -> CollectorRegistry:
    """A registry with the ledger's metrics alone."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(LedgerCollector(ledger))
    return registry
