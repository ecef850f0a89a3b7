"""A service that says what one engine serves: whatever it was told last. It stands in where no engine is measured.

A process of its own, as a service is: in the trainer's, it would take turns with the publisher.

    python served.py RUN        prints its port
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import msgspec

from refitd_client import Publication
from refitd_client.contract.states import EngineState, Kind, VersionState
from refitd_client.contract.wire import Engine, Page, Version


class Served:
    """Where it listens."""

    def __init__(self, url: str) -> None:
        self.url = url

    def serve(self, publication: Publication) -> None:
        """From now on this version is served."""
        said = {"run": publication.run, "version": publication.version_id, "step": publication.step}
        httpx.put(self.url, json=said, trust_env=False).raise_for_status()


@contextmanager
def served(run: str) -> Iterator[Served]:
    """Listens for the length of the block."""
    with subprocess.Popen([sys.executable, __file__, run], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Served(f"http://127.0.0.1:{int(process.stdout.readline())}")
        finally:
            process.terminate()


class Handler(BaseHTTPRequestHandler):
    """What is asked and told."""

    protocol_version = "HTTP/1.1"
    engine: Engine

    def do_GET(self) -> None:
        """The engine, and no versions."""
        items = [Handler.engine] if self.path.startswith("/v1/engines") else []
        self._answer(200, Page(items=items, next_cursor=None))

    def do_PUT(self) -> None:
        """What the engine serves."""
        said = self._said()
        Handler.engine = Engine(
            id="engine", url="http://engine", state=EngineState.IN_SYNC, run=said["run"], version=said["version"],
            step=said["step"],
        )  # fmt: skip
        self._answer(200, {})

    def do_POST(self) -> None:
        """A notice."""
        notice = self._said()
        version = Version(
            id=f"{notice['run']}~v{notice['step']:06d}", run=notice["run"], generation=1, step=notice["step"],
            kind=Kind(notice["kind"]), state=VersionState.ANNOUNCED, path=notice["path"],
            created_at="2026-11-21T12:00:00Z", bytes=0,
        )  # fmt: skip
        self._answer(202, version)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Nothing."""

    def _said(self) -> dict[str, Any]:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def _answer(self, status: int, body: object) -> None:
        data = msgspec.json.encode(body)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    """Listen until the end."""
    Handler.engine = Engine(id="engine", url="http://engine", state=EngineState.BEHIND, run=sys.argv[1])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
