"""vLLM's weight API by script: each route answers as vLLM 0.32.0 was seen to answer until it is told otherwise, and
every call is on record.

No real server can be made to hang up in the middle of a chosen answer; this can. It serves what it was last told to.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from .scripted_server import Seen, Server, Step, answer, page, serve

POSTED = frozenset(
    {
        "/abort_requests",
        "/collective_rpc",
        "/pause",
        "/reset_encoder_cache",
        "/reset_mm_cache",
        "/reset_prefix_cache",
        "/resume",
        "/sleep",
        "/update_weight_version",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/wake_up",
        "/weight_checker",
    }
)
OF_NOTHING = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # what is repacked
SHAPE = (
    "Call to collective_rpc method failed: Worker failed with error '', please check the stack trace above "
    "for the root cause"
)
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


def error(status: int, message: str) -> Step:
    """An answer of the routes that go through the engine."""
    return answer(status, {"error": {"message": message, "type": "InternalServerError", "param": None, "code": status}})


def config(**changes: Any) -> dict[str, Any]:
    """What /server_info?config_format=json says, as far as it matters. `changes` are of `parallel_config`."""
    parallel = {
        "pipeline_parallel_size": 1,
        "tensor_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "data_parallel_size": 1,
        "enable_expert_parallel": False,
        "enable_eplb": False,
        "worker_extension_cls": "",
        "world_size": 1,
    }
    return {
        "vllm_config": {
            "model_config": {
                "model": "/base",
                "dtype": "torch.bfloat16",
                "quantization": None,
                "enable_sleep_mode": False,
                "multimodal_config": None,
            },
            "parallel_config": {**parallel, **changes},
            "device_config": {"device": "cuda"},
            "speculative_config": None,
            "lora_config": None,
            "instance_id": "1795396894577821544",
        },
        "vllm_env": {"VLLM_SERVER_DEV_MODE": True},
        "system_env": {},
    }


@dataclass
class ScriptedVllm:
    """`script` maps routes to the steps to come; a route without one does its work.

    `covered`: its digests cover all parameters, as on a GPU. `dead`: its engine is, as /health says.
    """

    server: Server
    version: str = "0.32.0"
    label: str = "default"
    loaded: str = "/base"
    paused: bool = False
    covered: bool = True
    absent: frozenset[str] = frozenset()
    told: dict[str, Any] = field(default_factory=config)
    ranks: int = 1
    adapters: dict[str, str] = field(default_factory=dict)
    ignores_adapters: bool = False  # it lists them, and answers as the model alone
    dead: bool = False
    script: dict[str, list[Step]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def changes(self) -> list[str]:
        """The calls that change something, in order, a call through /collective_rpc by its method.

        The label is set while caches are emptied; here it stands behind that.
        """
        calls: list[str] = []
        for seen in self.server.seen:
            if seen.method == "POST" and seen.path not in {"/weight_checker", "/v1/completions"}:
                body = json.loads(seen.body)
                calls.append(body["method"] if seen.path == "/collective_rpc" else seen.path)
                at = len(calls) - 1
                while at and "/reset_" in calls[at] and calls[at - 1] == "/update_weight_version":
                    calls[at - 1 : at + 1] = reversed(calls[at - 1 : at + 1])
                    at -= 1
        return calls

    @property
    def loads(self) -> list[str]:
        """The paths that it was told to load, in order."""
        bodies = [json.loads(seen.body) for seen in self.server.seen if seen.path == "/collective_rpc" and seen.body]
        assert not any("timeout" in body for body in bodies)  # one that expires kills the engine
        return [body["kwargs"]["weights_path"] for body in bodies if body.get("method") == "reload_weights"]

    def on(self, path: str, *steps: Step) -> None:
        """Script the next posts to a route, or calls of a method."""
        self.script[path] = list(steps)

    def step(self, handler: BaseHTTPRequestHandler) -> None:
        """Take one call."""
        seen: Seen = vars(handler)["seen"]  # not the last one: calls come at once
        path = handler.path.partition("?")[0]
        body = json.loads(seen.body) if seen.body else {}
        if path in self.absent:
            answer(404, {"detail": "Not Found"})(handler)
        elif handler.command == "GET" and path in POSTED:
            answer(405, {"detail": "Method Not Allowed"})(handler)
        elif steps := self.script.get(body.get("method") or path):
            steps.pop(0)(handler)
        else:
            self.work(path, handler.path, body)(handler)

    def work(self, path: str, whole: str, body: dict[str, Any]) -> Step:
        """Do what the call says."""
        match path:
            case "/pause" | "/resume" | "/sleep" | "/wake_up":
                return self._paused(path, whole)
            case "/collective_rpc":
                return self._call(body)
            case "/update_weight_version":
                self.label = body["new_version"]
                return answer(200, {"success": True, "new_version": self.label})
            case "/reset_prefix_cache":
                assert "reset_running_requests=true" in whole
                return answer(200, {"success": True})
            case "/v1/completions":
                assert not self.paused, "a prompt waits for ever"
                return self.completion(adapter=body.get("model"))
            case "/v1/load_lora_adapter":
                assert "load_inplace" not in body, "each step of each request would read the folder again"
                if body["lora_name"] in self.adapters:
                    return error(400, "has already been loaded")
                self.adapters[body["lora_name"]] = body["lora_path"]
                return page(200, b"Success: LoRA adapter added successfully.")
            case "/v1/unload_lora_adapter":
                del self.adapters[body["lora_name"]]
                return page(200, b"Success: LoRA adapter removed successfully.")
            case "/health":
                return page(503 if self.dead else 200, b"")
            case _:
                told = self._told(path)
                return answer(404, {"detail": "Not Found"}) if told is None else answer(200, told)

    def _paused(self, path: str, whole: str) -> Step:
        self.paused = path in {"/pause", "/sleep"}
        if path == "/sleep":
            assert "level=0&" in whole, "any other level takes the weights out of its memory"
            return answer(200, {"status": "sleeping", "level": 0})
        if path == "/wake_up":
            assert whole.endswith("?tags=scheduling"), "all else brings memory back"
            return answer(200, {"status": "awake", "tags": ["scheduling"]})
        return answer(200, {"status": "paused" if self.paused else "resumed"})

    def _told(self, path: str) -> Any:
        match path:
            case "/version":
                return {"version": self.version}
            case "/weight_info":
                return {"weight_version": self.label}
            case "/server_info":
                return self.told
            case "/v1/models":
                cards = [{"id": name, "root": path, "parent": "/base"} for name, path in self.adapters.items()]
                return {"data": [{"id": "/base", "root": "/base", "parent": None}, *cards]}
            case "/is_paused":
                return {"is_paused": self.paused}
            case "/is_sleeping":
                return {"is_sleeping": self.paused}
            case "/weight_checker":
                name = "dp0:pp0:pcp0:tp0:model"
                linear = self.loaded if self.covered else OF_NOTHING
                return {"checksums": {f"{name}.norm.weight": self.loaded, f"{name}.qkv_proj.weight": linear}}
            case _:
                return {} if path in POSTED else None

    def _call(self, body: dict[str, Any]) -> Step:
        if body["method"] == "reload_weights":
            self.loaded = body["kwargs"]["weights_path"]
            return answer(200, {"results": [None] * self.ranks})
        return answer(200, {"results": [["generate"]] * self.ranks})

    def completion(self, shift: float = 0.0, adapter: str | None = None) -> Step:
        """The answer to a prompt; what is loaded decides the scores."""
        if adapter is not None and adapter not in self.adapters:
            return error(404, f"The model `{adapter}` does not exist.")
        is_plain = adapter is None or self.ignores_adapters
        score = -float(len(self.loaded if is_plain else self.adapters[adapter or ""])) + shift
        scores = [None, *[score] * 15, *[-0.5] * 8]
        return answer(
            200, {"choices": [{"index": 0, "logprobs": {"token_logprobs": scores}, "finish_reason": "length"}]}
        )


@contextmanager
def scripted_vllm(**state: Any) -> Iterator[ScriptedVllm]:
    """One on loopback."""
    with serve() as server:
        vllm = ScriptedVllm(server, **state)
        server.steps.append(vllm.step)
        yield vllm
