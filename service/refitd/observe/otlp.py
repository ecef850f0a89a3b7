"""Sends traces to a collector: OTLP over HTTP, in a thread of the SDK's own, in batches, and never waited for."""

from collections.abc import Generator
from contextlib import contextmanager
from importlib.metadata import version as release_of
from importlib.util import find_spec
from typing import TYPE_CHECKING

from refitd.root.ownership import StartRefusedError

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


@contextmanager
def tracing(endpoint: str | None) -> Generator["Tracer | None"]:
    """A tracer while the service runs, None without an endpoint. What is left at the end is sent then.

    What else there is to set (headers, compression, certificates) OpenTelemetry takes from its own variables
    (https://opentelemetry.io/docs/specs/otel/protocol/exporter/).

    Raises:
        StartRefusedError: OpenTelemetry is not installed.
    """
    if endpoint is None:
        yield None
        return
    if not all(_is_there(name) for name in _NEEDED):
        raise StartRefusedError(
            "--otlp-endpoint (REFITD_OTLP_ENDPOINT) needs OpenTelemetry: refitd's extra 'otel' brings it"
        )
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    release = release_of("refitd")
    provider = TracerProvider(resource=Resource.create({"service.name": "refitd", "service.version": release}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")))
    try:
        yield provider.get_tracer("refitd", release)
    finally:
        provider.shutdown()


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
