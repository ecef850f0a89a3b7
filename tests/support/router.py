"""The released sglang-router as a process. It needs neither a GPU nor SGLang."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from .servers import API_KEY, EngineServer, Server
from .sockets import free_port

START_PATIENCE = 60.0


class RouterServer(Server):
    """A router without workers, on a port of its own."""

    name = "router"
    ready = re.compile(rb"Starting server on 127\.0\.0\.1")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.port = free_port()
        self._workers: dict[str, str] = {}

    def command(self, port: int) -> Sequence[str]:
        """Its metrics have a port as well, which cannot be left to the system."""
        words = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
        return [sys.executable, "-m", "sglang_router.launch_router", *words]

    def environment(self) -> dict[str, str]:
        """Nothing of this tree, which it has no part in, and no proxy: its workers are on loopback."""
        return {
            name: value
            for name, value in os.environ.items()
            if name != "PYTHONPATH" and not name.lower().endswith("_proxy")
        }

    def add(self, engine: EngineServer) -> None:
        """Register an engine. The router lists it when it has looked at it."""
        body = {"url": engine.url, "api_key": API_KEY}
        self._workers[engine.url] = self._ask("POST", "/workers", json=body)["worker_id"]

    def remove(self, engine: EngineServer) -> None:
        """Take an engine that is listed off the list."""
        self._ask("DELETE", f"/workers/{self._workers.pop(engine.url)}")

    def _ask(self, method: str, path: str, json: object = None) -> dict[str, Any]:
        # It says where it listens right before it does: a connection that is refused is tried again.
        transport = httpx.HTTPTransport(retries=8)
        with httpx.Client(base_url=self.url, transport=transport, timeout=START_PATIENCE, trust_env=False) as http:
            return http.request(method, path, json=json).raise_for_status().json()
