"""How SGLang and vLLM are asked to generate, and how each loads a checkpoint by routes of its own."""

import json
import time
from pathlib import Path
from typing import Any, Protocol

import httpx


class Dialect(Protocol):
    """One kind of server. Generation is greedy and goes on for as many tokens as are asked for."""

    route: str

    def body(self, text: str, tokens: int, *, stream: bool = False) -> dict[str, Any]:
        """What to post to `route`."""
        ...

    def ids(self, answer: dict[str, Any]) -> list[int]:
        """The tokens of an answer that came in one piece."""
        ...

    def tokens(self, before: int, line: str) -> int:
        """How many tokens a stream has brought, by its next line and what it had brought before."""
        ...


class SGLang:
    """`/generate`."""

    route = "/generate"

    def body(self, text: str, tokens: int, *, stream: bool = False) -> dict[str, Any]:
        """See `Dialect`."""
        params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return {"text": text, "sampling_params": params, "stream": stream}

    def ids(self, answer: dict[str, Any]) -> list[int]:
        """See `Dialect`."""
        return answer["output_ids"]

    def tokens(self, before: int, line: str) -> int:
        """See `Dialect`. It says how many there are so far."""
        return json.loads(line.removeprefix("data: "))["meta_info"]["completion_tokens"]


class VLLM:
    """`/v1/completions`."""

    route = "/v1/completions"

    def body(self, text: str, tokens: int, *, stream: bool = False) -> dict[str, Any]:
        """See `Dialect`."""
        asked = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return {"prompt": text, "stream": stream} | asked

    def ids(self, answer: dict[str, Any]) -> list[int]:
        """See `Dialect`."""
        return answer["choices"][0]["token_ids"]

    def tokens(self, before: int, line: str) -> int:
        """See `Dialect`. Each line brings those that are new."""
        choices = json.loads(line.removeprefix("data: "))["choices"]
        return before + sum(len(choice.get("token_ids") or ()) for choice in choices)


DIALECTS: dict[str, Dialect] = {"sglang": SGLang(), "vllm": VLLM()}


def vllm_reload(http: httpx.Client, path: Path) -> dict[str, float]:
    """vLLM's own reload of a checkpoint, requests kept where they are: milliseconds of the pause, and of its stages."""
    steps = {
        "pause": ("/pause?mode=keep", {}),
        "load": ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}),
        "caches": ("/reset_prefix_cache?reset_running_requests=true", {}),
        "resume": ("/resume", {}),
    }
    began, took = time.monotonic(), {}
    for name, (route, body) in steps.items():
        stage = time.monotonic()
        http.post(route, json=body).raise_for_status()
        took[name] = (time.monotonic() - stage) * 1000
    return took | {"paused": (time.monotonic() - began) * 1000}
