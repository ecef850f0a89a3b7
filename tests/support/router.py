"""The released sglang-router as a process. It needs neither a GPU nor SGLang."""

import os
import re
import sys
import time
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

    @property
    def listed(self) -> list[str]:
        """The URLs of its workers."""
        workers: Any = self._ask("GET", "/workers")["workers"]
        return sorted(worker["url"] for worker in workers)

    def until_listed(self, *engines: EngineServer) -> None:
        """Wait until its workers are these. It changes its list a moment after it was asked to."""
        ends, wanted = time.monotonic() + START_PATIENCE, sorted(engine.url for engine in engines)
        while (found := self.listed) != wanted:
            assert time.monotonic() < ends, f"it lists {found}, not {wanted}"
            time.sleep(0.01)  # it has no way to tell

    def generate(self) -> str:
        """Ask for a few tokens as a rollout does; the label that answered, or the status of an error."""
        body = {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}}
        with httpx.Client(base_url=self.url, timeout=START_PATIENCE, trust_env=False) as http:
            reply = http.post("/generate", json=body)
            return reply.json()["meta_info"]["weight_version"] if reply.is_success else str(reply.status_code)

    def _ask(self, method: str, path: str, json: object = None) -> dict[str, Any]:
        # It says where it listens right before it does: a connection that is refused is tried again.
        transport = httpx.HTTPTransport(retries=8)
        with httpx.Client(base_url=self.url, transport=transport, timeout=START_PATIENCE, trust_env=False) as http:
            return http.request(method, path, json=json).raise_for_status().json()
