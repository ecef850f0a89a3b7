"""A follower of an older release: today's, and a translator on each way that knows the wire of then.

The wire of then is that of the first release in which a hub led hosts, by names: what came since is missing in what the
follower says, and refused in what it is asked, as its own parser would.
"""

import json
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from urllib.parse import urlsplit, urlunsplit

import httpx

from .scripted_server import problem, serve
from .sockets import free_port

NOT_SAID_THEN = {"orders", "process", "lost"}
NOT_TAKEN_THEN = {"after"}
_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive", "host", "date", "server"}


@contextmanager
def translated(to: str, port: int | None = None) -> Generator[str]:
    """Serve what `to` serves, in the words of then. Yields its URL."""
    with httpx.Client(timeout=60, trust_env=False) as client, serve(port=port or free_port()) as server:
        server.steps.append(lambda handler: _pass_on(client, to, handler))
        yield server.url


def _pass_on(client: httpx.Client, to: str, handler: BaseHTTPRequestHandler) -> None:
    seen = handler.seen
    said = json.loads(seen.body) if seen.body.startswith(b"{") else None
    if said is not None and (unknown := NOT_TAKEN_THEN & said.keys()):
        problem(422, "bad-request", f"{unknown}: extra fields are not permitted")(handler)
        return
    body = seen.body if said is None else json.dumps(_of_then(said)).encode()
    url = urlsplit(seen.path)
    query = "" if url.path.endswith("/blocks") else url.query  # whose size could not be chosen
    headers = {name: value for name, value in seen.headers.items() if name not in _HOP}
    wanted = to + urlunsplit(("", "", url.path, query, ""))
    with client.stream(handler.command, wanted, content=body, headers=headers) as reply:
        handler.send_response(reply.status_code)
        for name, value in reply.headers.items():
            if name not in _HOP:
                handler.send_header(name, value)
        if url.path in {"/v1/follow", "/v1/follow/desired"} and reply.is_success:
            text = json.dumps(_of_then(json.loads(reply.read()))).encode()
            handler.send_header("Content-Length", str(len(text)))
            handler.end_headers()
            handler.wfile.write(text)
            return
        handler.send_header("Connection", "close")
        handler.end_headers()
        for part in reply.iter_raw():
            handler.wfile.write(part)
        handler.close_connection = True


def _of_then(said: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in said.items() if name not in NOT_SAID_THEN}
