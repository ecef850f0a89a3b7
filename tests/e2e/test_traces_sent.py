"""A service that is told of a collector sends it the trace of each version, as OpenTelemetry's protocol has it."""

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from refitd_client import WeightPublisher
from support.checkpoints import tensors, write_model
from support.servers import RefitdServer


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """A collector's URL, and the spans that it was sent."""
    spans: list[Any] = []

    class Take(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
            assert self.path == "/v1/traces"
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Take)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", spans
    server.shutdown()
    server.server_close()


def test_spans_reach_a_collector_and_the_last_ones_are_sent_when_it_stops(
    tmp_path: Path, collector: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, spans = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    root = tmp_path / "root"
    root.mkdir()
    base = write_model(tmp_path / "base")
    with (
        RefitdServer(tmp_path, root, [], "--base-model", str(base)) as refitd,
        WeightPublisher(root, "run", refitd.url) as publisher,
    ):
        publisher.publish(tensors(1), step=1).wait(60, "sealed")
        refitd.stop()  # the version is still on its way: no engine is there
    names = [span.name for span in spans]
    assert sorted(names) == ["refitd.publish", "refitd.seen", "refitd.validate", "refitd.version"]
    assert len({span.trace_id for span in spans}) == 1
