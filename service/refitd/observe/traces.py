"""One trace for each version (OpenTelemetry). `refitd_client.publish.tracing` begins it; here are the service's spans.

Most of what happens is known only when it is over: for how long a version was seen and validated, and the stages of an
engine's load. Such spans are made then, with the times that they had. A version's own span begins at its first sight,
and is opened when it is known which trace it belongs to: the notice says so or, for one that was found, the manifest.

It ends when the version is served, or will not be. Spans of engines that are late, and of repairs, are its children all
the same; after a restart of the service they are children of the trainer's span.
"""

import time
from dataclasses import dataclass
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from refitd.engine.port import Outcome, Stage
from refitd.policy.materialize import COPY_STAGE
from refitd.state.observer import Observer
from refitd.state.records import AttemptRecord, UpdateRecord
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd_client.contract.states import VersionState

_STAGES = {Stage.LOAD: "load-weights"}  # beside refitd.load, which is all of it
_MS = 1_000_000  # nanoseconds


@dataclass(slots=True)
class _Seen:
    """A version of which a span is open, or will be; `context` is what its parts are put beneath."""

    since: int
    span: Span | None = None
    context: Context | None = None


class Traces(Observer):
    """Makes spans of what the store tells. Times are of the wall clock, as traces of several hosts want them."""

    def __init__(self, tracer: Tracer, store: Store) -> None:
        self._tracer = tracer
        self._store = store
        self._seen: dict[str, _Seen] = {}
        self._loads: dict[str, Span] = {}

    def version_changed(self, before: VersionRecord | None, after: VersionRecord) -> None:
        if before is None:
            self._seen[after.id] = _Seen(time.time_ns())
        seen = self._seen.get(after.id)
        if seen is None:
            return  # it is from before the service started
        if seen.context is None and (after.announced.noticed or not after.state.is_open):
            self._open(seen, after)
        if before is not None and "validate" not in before.career.timings and "validate" in after.career.timings:
            self._verdict(seen, after)
        if before is not None and COPY_STAGE not in before.career.timings and COPY_STAGE in after.career.timings:
            now = time.time_ns()
            self._part(COPY_STAGE, seen.context, now - int(after.career.timings[COPY_STAGE] * _MS), now)
        if after.served_at is not None or after.barred or after.state.is_bad or after.state.is_over:
            self._close(seen, after)
        if after.state is VersionState.DELETED:
            del self._seen[after.id]

    def _open(self, seen: _Seen, version: VersionRecord) -> None:
        parent = parent_of(version)
        published = int(version.career.timings.get("publish", 0.0) * _MS) if parent is None else 0
        seen.span = self._tracer.start_span(
            "refitd.version", parent, attributes=_facts(version), start_time=seen.since - published
        )
        seen.context = trace.set_span_in_context(seen.span)
        if published:  # a trainer that does not trace has said how long it took all the same
            self._part("publish", seen.context, seen.since - published, seen.since)

    def _verdict(self, seen: _Seen, version: VersionRecord) -> None:
        now = time.time_ns()
        begun = now - int(version.career.timings["validate"] * _MS)
        self._part("seen", seen.context, seen.since, begun)
        self._part("validate", seen.context, begun, now)

    def _close(self, seen: _Seen, version: VersionRecord) -> None:
        span, seen.span = seen.span, None
        if span is None:
            return
        served = version.served_at is not None
        span.set_attributes(_facts(version) | {"refitd.outcome": "served" if served else version.state.value.lower()})
        if not served:
            span.set_status(Status(StatusCode.ERROR, version.reason))
        span.end()

    def close(self) -> None:
        """The service stops: what is on its way goes on under the next one, and is told as far as it went."""
        for span in [*self._loads.values(), *(seen.span for seen in self._seen.values() if seen.span is not None)]:
            span.set_attribute("refitd.outcome", "the service was stopped")
            span.end()
        self._loads.clear()
        self._seen.clear()

    def update_changed(self, update: UpdateRecord) -> None:
        seen = self._seen.get(update.version)
        if seen is None or seen.span is None:
            return
        seen.span.add_event(f"update {update.state.value}", {"refitd.update": update.number})
        if not (update.state.is_under_way or update.state.is_proven):
            seen.span.set_attribute("refitd.outcome", update.state.value.lower())
            seen.span.end()
            seen.span = None

    def attempt_changed(self, attempt: AttemptRecord) -> None:
        if attempt.outcome is None:
            facts = {"refitd.engine": attempt.engine, "refitd.version": attempt.version, "refitd.attempt": attempt.id}
            self._loads[attempt.id] = self._tracer.start_span(
                "refitd.load", self._context_of(attempt.version), kind=trace.SpanKind.CLIENT, attributes=facts
            )
        elif (span := self._loads.pop(attempt.id, None)) is not None:
            self._stages(span, attempt)
            span.set_attribute("refitd.outcome", attempt.outcome.lower())
            if attempt.outcome != Outcome.ACK.name:
                span.set_status(Status(StatusCode.ERROR, attempt.reason))
            span.end()

    def _context_of(self, version: str) -> Context | None:
        seen = self._seen.get(version)
        if seen is not None and seen.context is not None:
            return seen.context
        record = self._store.versions.get(version)
        return None if record is None else parent_of(record)

    def _stages(self, load: Span, attempt: AttemptRecord) -> None:
        """They came one after the other, and the last one has just ended."""
        context, end = trace.set_span_in_context(load), time.time_ns()
        for stage in reversed(Stage):
            if stage.value in attempt.timings:
                begun = end - int(attempt.timings[stage.value] * _MS)
                self._part(_STAGES.get(stage, stage.value), context, begun, end)
                end = begun

    def _part(self, name: str, context: Context | None, begun: int, end: int) -> None:
        self._tracer.start_span(f"refitd.{name}", context, start_time=begun).end(end)


def parent_of(version: VersionRecord) -> Context | None:
    """The trainer's span, as the version's metadata name it; None where they name nothing that could be one."""
    context = TraceContextTextMapPropagator().extract(version.announced.metadata, Context())
    return context if trace.get_current_span(context).get_span_context().is_valid else None


def _facts(version: VersionRecord) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "refitd.version": version.id,
        "refitd.run": version.run,
        "refitd.step": version.order.step,
        "refitd.kind": version.kind.value,
        "refitd.bytes": version.files.bytes,
        "refitd.reason": version.verdict.code,
    }
    return {name: value for name, value in facts.items() if value is not None}
