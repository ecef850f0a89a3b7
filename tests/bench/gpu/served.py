"""A service that says what one engine serves: whatever it was told last. It stands in where no engine is measured."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec

from refitd_client import Publication
from refitd_client.contract.states import EngineState, Kind, VersionState
from refitd_client.contract.wire import Engine, Page, Version


class Served:
    """What is served; `url` is where it is said."""

    def __init__(self, run: str) -> None:
        self.url = ""
        self.engine = Engine(id="engine", url="http://engine", state=EngineState.BEHIND, run=run)

    def serve(self, publication: Publication) -> None:
        """From now on this version is."""
        self.engine = Engine(
            id="engine", url="http://engine", state=EngineState.IN_SYNC, run=publication.run,
            version=publication.version_id, step=publication.step,
        )  # fmt: skip


@contextmanager
def served(run: str) -> Iterator[Served]:
    """Listens for the length of the block."""
    said = Served(run)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(
                200, Page(items=[said.engine] if self.path.startswith("/v1/engines") else [], next_cursor=None)
            )

        def do_POST(self) -> None:
            notice = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            version = Version(
                id=f"{notice['run']}~v{notice['step']:06d}", run=notice["run"], generation=1, step=notice["step"],
                kind=Kind(notice["kind"]), state=VersionState.ANNOUNCED, path=notice["path"],
                created_at="2026-11-21T12:00:00Z", bytes=0,
            )  # fmt: skip
            self._answer(202, version)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            """Nothing."""

        def _answer(self, status: int, body: object) -> None:
            data = msgspec.json.encode(body)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    said.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield said
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
