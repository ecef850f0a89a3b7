"""A real HTTP server that misbehaves by script: each request takes the next step, the last one for ever.

A real service cannot be made to hang up in the middle of an answer at a chosen request; this can.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Step = Callable[[BaseHTTPRequestHandler], None]
PATIENCE = 30.0  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A request that reached the server."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(slots=True, kw_only=True)
class Server:
    url: str
    steps: list[Step]
    seen: list[Seen] = field(default_factory=list)
    turn: threading.Condition = field(default_factory=threading.Condition)
    stop_listening: Callable[[], None] = lambda: None

    def next_step(self, seen: Seen) -> Step:
        with self.turn:
            self.seen.append(seen)
            self.turn.notify_all()
            return self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]

    async def until(self, path: str, times: int = 1) -> None:
        """Wait until a path was called so many times."""

        def called() -> bool:
            return sum(seen.path == path for seen in self.seen) >= times

        def wait() -> bool:
            with self.turn:
                return self.turn.wait_for(called, PATIENCE)

        assert await asyncio.to_thread(wait)


def answer(status: int, body: Any = None, **headers: str) -> Step:
    """Answer with JSON, or with the bytes given."""

    def step(handler: BaseHTTPRequestHandler) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        handler.send_response(status)
        given = {"Content-Type": "application/json"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        for name, value in given.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    return step


def page(status: int, html: bytes = b"<html><h1>Welcome to nginx</h1></html>") -> Step:
    """Answer as a proxy does."""
    return answer(status, html, Content_Type="text/html; charset=utf-8")


def problem(status: int, slug: str, detail: str = "so it is", **headers: str) -> Step:
    """Answer with a problem document."""
    document = {"type": f"urn:refitd:problem:{slug}", "title": "No", "status": status, "detail": detail}
    return answer(status, document, **{"Content_Type": "application/problem+json", **headers})


def hang_up(handler: BaseHTTPRequestHandler) -> None:
    """Take the request and close the connection without a word."""
    handler.close_connection = True


def silence(handler: BaseHTTPRequestHandler) -> None:
    """Say nothing until the client has had enough."""
    handler.connection.settimeout(PATIENCE)
    with suppress(OSError):
        handler.connection.recv(1)
    handler.close_connection = True


def cut(handler: BaseHTTPRequestHandler) -> None:
    """Close the connection in the middle of the answer."""
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"id": "exp')
    handler.close_connection = True


def stream(content: bytes) -> Step:
    """Send an event stream and hang up at its end."""

    def step(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream; charset=utf-8")
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(content)
        handler.close_connection = True

    return step


class _Threading(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # of five, a client that opens more connections at once waits a second for one of them


@contextmanager
def serve(*steps: Step, port: int = 0) -> Iterator[Server]:
    """Serve on loopback, on a free port unless one is given."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # headers and body are two packets, and the second would wait 40 ms

        def log_message(self, *_: object) -> None:
            pass

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            self.seen = Seen(method=self.command, path=self.path, headers=headers, body=body)
            with suppress(ConnectionError):  # the client has gone
                server.next_step(self.seen)(self)

        do_GET = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815 - the names that http.server calls

    http = _Threading(("127.0.0.1", port), Handler)
    server = Server(url=f"http://127.0.0.1:{http.server_port}", steps=list(steps))
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()

    def stop_listening() -> None:
        http.shutdown()
        thread.join()
        http.server_close()

    server.stop_listening = stop_listening
    try:
        yield server
    finally:
        stop_listening()
