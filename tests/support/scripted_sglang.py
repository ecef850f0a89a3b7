"""SGLang's API by script: each route answers well until it is told otherwise, and every call is on record.

No real server can be made to hang up in the middle of a chosen answer; this can. It serves what it was last told to.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from .scripted_server import Server, Step, answer, serve

DONE = "Succeeded to update model weights."
NO_FILES = "Failed to get weights iterator: Cannot find any model weights with `/root/v7`."
_OF_GROUPS = frozenset(
    {"/init_weights_update_group", "/begin_weight_update", "/end_weight_update", "/destroy_weights_update_group"}
)
CLEARED = b"Hierarchical cache storage backend cleared.\n"


def said(status: int, message: str) -> Step:
    """An answer of the routes that change weights."""
    return answer(status, {"success": status == 200, "message": message, "num_paused_requests": 0})


@dataclass
class ScriptedSglang:
    """`script` maps routes to the steps to come; a route without one does its work. `told`: how it was started;
    `received`: what it holds after the last bucket of a group.
    """

    server: Server
    version: str = "0.5.23"
    served: dict[str, str] = field(default_factory=lambda: {"model_path": "/base", "weight_version": "default"})
    launched: str = "/base"
    told: dict[str, Any] = field(default_factory=dict)
    ranks: list[dict[str, str]] = field(default_factory=lambda: [{"w": "/base"}])
    received: list[dict[str, str]] = field(default_factory=lambda: [{"w": "sent"}])
    script: dict[str, list[Step]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def calls(self) -> list[str]:
        """The routes that were called, in order."""
        return [seen.path for seen in self.server.seen]

    @property
    def changes(self) -> list[str]:
        """Those of them that change something."""
        return [path for path in self.calls if path not in {"/model_info", "/server_info", "/weights_checker"}]

    def bodies(self, path: str) -> list[dict[str, Any]]:
        """What was sent to a route."""
        return [json.loads(seen.body) for seen in self.server.seen if seen.path == path]

    def on(self, path: str, *steps: Step) -> None:
        """Script the next calls to a route."""
        self.script[path] = list(steps)

    def step(self, handler: BaseHTTPRequestHandler) -> None:
        """Take one call."""
        if steps := self.script.get(handler.path):
            steps.pop(0)(handler)
        else:
            self._work(handler.path)(handler)

    def _work(self, path: str) -> Step:
        match path:
            case "/model_info":
                return answer(200, self.served)
            case "/server_info":
                return answer(200, {"version": self.version, "model_path": self.launched, **self.told})
            case "/hicache/storage-backend/clear":
                return answer(200, CLEARED)
            case "/weights_checker":
                return answer(200, {"success": True, "ranks": [{"checksums": rank} for rank in self.ranks]})
            case "/update_weights_from_disk":
                return self.load()
            case "/update_weights_from_distributed":
                return self.receive()
            case path if path in _OF_GROUPS:
                return said(200, "Success")
            case "/generate":
                meta = {"output_token_logprobs": [[-1.0, 5, None]], "weight_version": self.served["weight_version"]}
                return answer(200, {"meta_info": meta})
            case _:
                return answer(200, {"message": "done", "status": "ok"})

    def load(self) -> Step:
        """Do what the last order says."""
        order = self.bodies("/update_weights_from_disk")[-1]
        self.served = {"model_path": order["model_path"], "weight_version": order["weight_version"]}
        self.ranks = [{"w": order["model_path"]}]
        return said(200, DONE)

    def receive(self) -> Step:
        """Take a bucket of the group. It changes the label where it says one, and no path."""
        order = self.bodies("/update_weights_from_distributed")[-1]
        if "weight_version" in order:
            self.served = self.served | {"weight_version": order["weight_version"]}
            self.ranks = self.received
        return said(200, "Succeeded to update parameter online.")


@contextmanager
def scripted_sglang(**state: Any) -> Iterator[ScriptedSglang]:
    """One on loopback."""
    with serve() as server:
        sglang = ScriptedSglang(server, **state)
        server.steps.append(sglang.step)
        yield sglang
