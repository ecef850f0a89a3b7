"""What is counted and timed as it happens. What can be read off the store is in `refitd.api.metrics` instead.

No label grows without bound: a version's step is a value, never a label. Every label value that can be foreseen is
there from the start, at zero, so that `rate()` and `increase()` see the first error as well.
"""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from refitd.engine.port import Outcome, Stage
from refitd.problem import Kind as Problem
from refitd.state.copy import COPY_STAGE
from refitd.state.observer import SilentObserver
from refitd.state.records import NOT_SENT, AttemptRecord
from refitd.state.version import VersionRecord
from refitd_client.checkpoint.fault import Code
from refitd_client.contract.states import DeliveryState, Kind, VersionState
from refitd_client.contract.wire import Event

STAGES = ("publish", "seen", "validate", COPY_STAGE, *(stage.value for stage in Stage))
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)  # seconds
UNFINISHED = "unfinished"  # given up before there was anything to validate
LOST = "lost"

_BEFORE_LOADS = frozenset({"publish", "seen", "validate", COPY_STAGE})
_OUTCOMES = (*(outcome.name for outcome in Outcome), NOT_SENT)


class Meters(SilentObserver):
    """Histograms and counters, fed by the store and, for problems, by the API."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register everything, at zero."""
        self._stages = Histogram(
            "refitd_stage_seconds",
            "Time of each stage of an update; from prepare on by engine, of loads that the engine took",
            ["stage"],
            buckets=BUCKETS,
            registry=registry,
        )
        self._updates = Histogram(
            "refitd_update_seconds",
            "Time from when a version was first seen until it was served",
            buckets=BUCKETS,
            registry=registry,
        )
        self._loads = Counter("refitd_loads", "Loads by how they ended", ["outcome"], registry=registry)
        self._errors = Counter(
            "refitd_errors", "What went wrong, by part and reason", ["part", "reason"], registry=registry
        )
        self._decisions = Counter(
            "refitd_decisions", "Entries in the log of decisions", ["kind", "state"], registry=registry
        )
        self._published = Counter(
            "refitd_published_bytes", "Bytes of versions that were found good", ["kind"], registry=registry
        )
        self._deliveries = Counter(
            "refitd_deliveries", "Webhooks that are over, by how they ended", ["outcome"], registry=registry
        )
        self._waiting = Gauge("refitd_deliveries_waiting", "Webhooks that nobody has taken yet", registry=registry)
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
        for state in DeliveryState:
            if state is not DeliveryState.WAITING:
                self._deliveries.labels(_word(state.value))
        for kind in Kind:
            if kind is not Kind.HANDOVER:  # what is handed over is found good by its files, as what these are
                self._published.labels(kind.value)

    def version_changed(self, before: VersionRecord | None, after: VersionRecord) -> None:
        """See `Observer`."""
        state = None if before is None else before.state
        known = {} if before is None else before.timings
        for stage in _BEFORE_LOADS & (after.timings.keys() - known.keys()):
            self._stages.labels(stage).observe(after.timings[stage] / 1000)
        if after.state is state:
            return
        match after.state:
            case VersionState.SEALED if state is not VersionState.LOST:
                self._published.labels(after.kind.value).inc(after.bytes or 0)
            case VersionState.REJECTED:
                self._errors.labels("version", UNFINISHED if after.code is None else after.code.value).inc()
            case VersionState.LOST:
                self._errors.labels("version", LOST).inc()
            case _:
                pass

    def attempt_changed(self, attempt: AttemptRecord) -> None:
        """See `Observer`."""
        if attempt.outcome is None:
            return
        self._loads.labels(_word(attempt.outcome)).inc()
        if attempt.outcome != Outcome.ACK.name:
            self._errors.labels("load", _word(attempt.outcome)).inc()
            return
        for stage, milliseconds in attempt.timings.items():
            self._stages.labels(stage).observe(milliseconds / 1000)

    def decided(self, event: Event) -> None:
        """See `Observer`."""
        self._decisions.labels(event.kind, str(event.data.get("state", ""))).inc()

    def served(self, milliseconds: float) -> None:
        """A version was served for the first time, so long after it was first seen."""
        self._updates.observe(milliseconds / 1000)

    def delivery_ended(self, state: DeliveryState) -> None:
        """A webhook was taken, or given up."""
        self._deliveries.labels(_word(state.value)).inc()

    def count_waiting(self, waiting: Callable[[], int]) -> None:
        """Ask `waiting` for the webhooks that wait."""
        self._waiting.set_function(waiting)

    def refused(self, problem: Problem) -> None:
        """A request was answered with a problem."""
        self._errors.labels("api", problem.slug).inc()


def _word(outcome: str) -> str:
    return outcome.lower().replace("_", "-")
