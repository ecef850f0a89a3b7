"""An HTTP server that answers as a test tells it to, and remembers what it was asked."""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec

from refitd_client.contract.states import Kind, VersionState, WaitOutcome
from refitd_client.contract.wire import EngineOnVersion, Problem, Version, VersionPage, WaitResult


@dataclass(frozen=True)
class Request:
    """What came in."""

    method: str
    path: str
    query: str
    authorization: str | None
    body: Any


Answer = tuple[int, Any]


@dataclass
class ScriptedService:
    """Listens on a port of its own. `answer` decides each reply, given all requests so far (the new one last).

    What it knows of a run is asked for before a publisher's first step: it knows `newest`, watches the root of the name
    `root`, and does not count that.
    """

    answer: Callable[[list[Request]], Answer]
    port: int = 0
    newest: Version | None = None
    root: str | None = None
    requests: list[Request] = field(default_factory=list)

    def __enter__(self) -> Self:
        service = self

        class Handler(BaseHTTPRequestHandler):
            def handle_any(self) -> None:
                url = urlsplit(self.path)
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                request = Request(
                    self.command, url.path, url.query, self.headers["Authorization"], json.loads(body) if body else None
                )
                if (request.method, request.path) == ("GET", "/v1/versions"):
                    known = [] if service.newest is None else [service.newest]
                    status, answer = 200, VersionPage(items=known, root=service.root)
                else:
                    service.requests.append(request)
                    status, answer = service.answer(service.requests)
                data = msgspec.json.encode(answer)
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = handle_any  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"


def version(
    state: VersionState = VersionState.SEALED,
    engines: list[EngineOnVersion] | None = None,
    reason: str | None = None,
    barred: bool = False,
    digest: str | None = None,
) -> Version:
    """Version 1 of run `run`."""
    return Version(
        id="run~v000001",
        run="run",
        generation=1,
        step=1,
        kind=Kind.FULL,
        state=state,
        path="run/v000001",
        created_at="2026-11-21T12:00:00Z",
        engines=engines or [],
        reason=reason,
        barred=barred,
        digest=digest,
    )


def waited(outcome: WaitOutcome, **about: Any) -> Answer:
    """The answer of the long poll."""
    return 200, WaitResult(outcome=outcome, version=version(**about))


def problem(status: int, slug: str) -> Answer:
    """A problem document."""
    return status, Problem(type=f"urn:refitd:problem:{slug}", title=slug.capitalize(), status=status, detail="because")
