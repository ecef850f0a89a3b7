"""A real S3 server that answers 503 or 500 at any request, cuts uploads, or refuses the key; and what is said of it."""

import logging
import tempfile
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import numpy as np
import pytest

from refitd_client import WeightPublisher
from refitd_client.bucket import objects, run
from refitd_client.bucket.objects import Bucket
from refitd_client.errors import BucketError, PublishError
from support import points
from support.buckets import counted
from support.checkpoints import tensors
from support.s3_bucket import signed
from support.s3_server import KEY, SECRET, S3Server, missing, s3_server

pytestmark = [pytest.mark.stores, pytest.mark.skipif(missing() is not None, reason=str(missing()))]
RUN = "run"
V1 = "run~v000001"
SLOW_DOWN = b"<Error><Code>SlowDown</Code></Error>"


@dataclass
class Failing:
    """Stands before the server: `answers` says for each request, by its number, which status it fails with."""

    url: str
    answers: Callable[[int], int | None] = lambda number: None
    seen: list[str] = field(default_factory=list[str])


@pytest.fixture(scope="module")
def server() -> Generator[S3Server]:
    with s3_server(Path(tempfile.mkdtemp(prefix="s3-"))) as running:
        yield running


@pytest.fixture
def failing(server: S3Server) -> Generator[Failing]:
    state = Failing("")
    turn = threading.Lock()
    onward = httpx.Client(trust_env=False, timeout=60)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            with turn:
                state.seen.append(f"{self.command} {self.path}")
                status = state.answers(len(state.seen) - 1)
            if status is not None:
                self._answer(status, {}, SLOW_DOWN if status == 503 else b"<Error><Code>InternalError</Code></Error>")
                return
            reply = onward.request(self.command, server.url + self.path, headers=dict(self.headers), content=body)
            self._answer(reply.status_code, dict(reply.headers), reply.content)

        def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in {"content-length", "connection", "transfer-encoding"}:
                    self.send_header(name, value)
            length = headers.get("content-length", "0") if self.command == "HEAD" else str(len(body))
            self.send_header("content-length", length)
            with suppress(OSError):  # who asked has gone
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name in the class above
            """Say nothing."""

    for verb in ("GET", "PUT", "POST", "DELETE", "HEAD"):
        setattr(Handler, f"do_{verb}", Handler._pass_on)
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    proxy.daemon_threads = True
    state.url = f"http://127.0.0.1:{proxy.server_port}"
    thread = threading.Thread(target=proxy.serve_forever)
    thread.start()
    try:
        yield state
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()
        onward.close()


@pytest.fixture
def name(server: S3Server, failing: Failing, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A bucket of its own, reached past `failing`."""
    for variable, value in {**server.environment, "AWS_ENDPOINT_URL": failing.url}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("REFITD_SPOOL", str(tmp_path / "spool"))
    return server.bucket()


@pytest.mark.points
@pytest.mark.parametrize("status", [503, 500])
def test_a_store_that_fails_at_any_request_of_a_publication_is_asked_again_or_it_is_said(
    name: str, failing: Failing, status: int
) -> None:
    with WeightPublisher(f"s3://{name}/calm", RUN) as publisher:
        publisher.publish(tensors(1), step=1)
    requests = len(failing.seen)
    assert requests > 10
    for number in points.taken(range(requests)):
        url, begins = f"s3://{name}/at-{number}", len(failing.seen)
        failing.answers = lambda count, at=begins + number: status if count == at else None
        with suppress(PublishError), WeightPublisher(url, RUN) as publisher:
            publisher.publish(tensors(1), step=1)
        failing.answers = lambda count: None
        if counted(Bucket.at(url), RUN) != [V1]:  # it was said, and nothing counts: the next publisher goes on
            with WeightPublisher(url, RUN) as publisher:
                publisher.publish(tensors(1), step=1)
        assert counted(Bucket.at(url), RUN)[0].startswith(V1)


def test_a_store_that_is_overloaded_for_good_ends_a_publication_in_a_sentence(
    name: str, failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("refitd_client.bucket.objects.RETRIES", 1)
    url = f"s3://{name}/weights"
    with WeightPublisher(url, RUN) as publisher:
        publisher.publish(tensors(1), step=1)
        failing.answers = lambda count: 503
        with pytest.raises(BucketError, match=r"could not be reached, or failed, to .* \((503|SlowDown)\)") as failed:
            publisher.publish(tensors(2), step=2)
        assert failed.value.may_heal
        failing.answers = lambda count: None
        assert counted(Bucket.at(url), RUN) == [V1]
        publisher.publish(tensors(3), step=3)
    assert counted(Bucket.at(url), RUN) == ["run~v000003", V1]


def test_an_upload_in_parts_that_fails_leaves_no_parts(
    name: str, server: S3Server, failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = 5 * 2**20  # the least that S3 takes
    for module in (run, objects):
        monkeypatch.setattr(module, "PART", part)
    monkeypatch.setattr("refitd_client.bucket.objects.RETRIES", 0)
    large = np.ones((3, 2**20), dtype=np.float32)  # 12 MiB: three parts
    with WeightPublisher(f"s3://{name}/weights", RUN) as publisher:
        publisher.publish(tensors(1), step=1)
        failing.answers = lambda count: 500 if "partNumber=2" in failing.seen[count] else None
        with pytest.raises(BucketError):
            publisher.publish({"large": large}, step=2)
        assert any("partNumber=2" in each for each in failing.seen), "it went in parts"
        failing.answers = lambda count: None
    assert counted(Bucket.at(f"s3://{name}/weights"), RUN) == [V1]
    left = signed("GET", server.url, f"/{name}", "uploads=", KEY, SECRET).text
    assert "<UploadId>" not in left


@pytest.mark.parametrize("secret", ["wrong-secret-of-this-test", SECRET])
def test_no_line_of_a_log_has_a_credential(
    name: str, failing: Failing, secret: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    caplog.set_level(logging.DEBUG)
    if secret == SECRET:
        failing.answers = lambda count: 500 if count % 7 == 3 else None
    with suppress(PublishError), WeightPublisher(f"s3://{name}/weights", RUN) as publisher:
        publisher.publish(tensors(1), step=1)
    for text in (secret, KEY, "Signature=", "X-Amz-Signature"):
        assert text not in caplog.text
    assert failing.seen
