"""An engine with HiCache's storage backend, imitated: SGLang's own wants a GPU (its host pool is pinned by CUDA).

It stands before an embedded engine. What was once computed for a prompt is found again by the prompt's tokens, whatever
the weights are by then, until it is cleared; a flush does not reach it. Here it is the whole answer, in SGLang the keys
and values that the answer is computed from.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import httpx

from .scripted_server import answer, serve
from .scripted_sglang import CLEARED

_FLAGS = {"enable_hierarchical_cache": True, "hicache_storage_backend": "file"}


class StoredPrefixes:
    """What it has stored, by prompt. `url` is its address."""

    def __init__(self, url: str, upstream: httpx.Client) -> None:
        self.url = url
        self.stored: dict[str, Any] = {}
        self._upstream = upstream

    def step(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        """Answer one call."""
        key = body.decode() if handler.path == "/generate" else ""
        if handler.path == "/hicache/storage-backend/clear":
            self.stored.clear()
            answer(200, CLEARED)(handler)
        elif key in self.stored:
            answer(200, self.stored[key])(handler)
        else:
            headers = {"Authorization": handler.headers["Authorization"], "Content-Type": "application/json"}
            reply = self._upstream.request(handler.command, handler.path, content=body, headers=headers)
            content = reply.content
            if handler.path == "/server_info":
                content = json.dumps(reply.json() | _FLAGS).encode()
            if key:
                self.stored[key] = reply.json()
            answer(reply.status_code, content)(handler)


@contextmanager
def storing_prefixes(upstream: str) -> Iterator[StoredPrefixes]:
    """One on loopback, before the engine at `upstream`."""
    with httpx.Client(base_url=upstream, timeout=60.0, trust_env=False) as client, serve() as server:
        stored = StoredPrefixes(server.url, client)

        def step(handler: BaseHTTPRequestHandler) -> None:
            seen = next(seen for seen in reversed(server.seen) if seen.path == handler.path)
            stored.step(handler, seen.body)

        server.steps.append(step)
        yield stored
