"""The trainer's part of a version's trace (OpenTelemetry), if the trainer traces; nothing at all if it does not.

    refitd.publish                   the trainer: from the first byte to the end of the notice
        refitd.notice
        refitd.version               the service: from its first sight until it is served, or will not be
            refitd.seen, refitd.validate
            refitd.load              one for each try of each engine
                refitd.prepare, refitd.pause, refitd.load-weights, refitd.verify, refitd.resume

W3C's `traceparent` (https://www.w3.org/TR/trace-context/) among the version's metadata connects them: it is in the
notice and in the manifest, so that a version which is found by watching belongs to its trace as well.

OpenTelemetry is used if the trainer has imported it, and never imported here: without the trainer's set-up its spans
would go nowhere.
"""

import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

TRACEPARENT = "traceparent"


class PublishTrace:
    """The span of one publication, from its first byte to its notice. It ends once; later calls do nothing."""

    def __init__(self, run: str, step: int) -> None:
        """Begin the span, under the one that is current in this thread, if there is one."""
        self._api: Any = sys.modules.get("opentelemetry.trace")
        self._span: Any = None
        if self._api is None:
            return
        self._tracer = self._api.get_tracer("refitd_client")
        span = self._tracer.start_span(
            "refitd.publish",
            kind=self._api.SpanKind.PRODUCER,
            attributes={"refitd.run": run, "refitd.step": step},
        )
        if span.get_span_context().is_valid:  # else OpenTelemetry was not set up
            self._span = span

    @property
    def carrier(self) -> dict[str, str]:
        """The entry for the version's metadata."""
        if self._span is None:
            return {}
        context = self._span.get_span_context()
        return {TRACEPARENT: f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"}

    def add(self, facts: Mapping[str, str | int | float]) -> None:
        """Add facts about the publication, by name."""
        if self._span is not None:
            self._span.set_attributes({f"refitd.{name}": value for name, value in facts.items()})

    @contextmanager
    def last_span(self, name: str) -> Generator[None, None, None]:
        """A span for the block, with whose end the publication's ends as well."""
        try:
            if self._span is None:
                yield
                return
            context = self._api.set_span_in_context(self._span)
            with self._tracer.start_as_current_span(f"refitd.{name}", context=context, kind=self._api.SpanKind.CLIENT):
                yield
        except BaseException as error:
            self.end(error)
            raise
        self.end()

    def end(self, error: BaseException | None = None) -> None:
        """End the span, as failed if there is an error."""
        if self._span is None:
            return
        if error is not None:
            self._span.record_exception(error)
            self._span.set_status(self._api.Status(self._api.StatusCode.ERROR, str(error)))
        self._span.end()
        self._span = None
