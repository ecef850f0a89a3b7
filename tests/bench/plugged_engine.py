"""A real SGLang with the plugin, as a benchmark speaks to it: over HTTP, and over its ranks' channels."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from refitd_client.contract.plugin import answers_in


class Engine:
    """The server, over HTTP and the channel."""

    def __init__(self, url: str, root: Path) -> None:
        self._http = httpx.Client(base_url=url, trust_env=False, timeout=120)
        self._root = root

    def post(self, route: str, **body: Any) -> Any:
        """One call."""
        return self._http.post(route, json=body)

    def update(self, path: Path, *, flush: bool = True) -> dict[str, Any]:
        """One update: what the plugin answers; a stock reload says nothing.

        SGLang before 0.5.21 dies of a flush while requests wait.
        """
        success, answer, message = self.told(path, flush=flush)
        assert success, message
        return answer

    def told(self, path: Path, *, flush: bool = True) -> tuple[bool, dict[str, Any], str]:
        """One update, however it ends: whether it went well, what the plugin answers, and what SGLang says."""
        order = {"model_path": str(path), "load_format": "auto", "flush_cache": flush}
        reply = self.post("/update_weights_from_disk", **order).json()
        told = [
            {name: getattr(each, name) for name in ("how", "contents", "proved", "needs", "ms")}
            for each in answers_in(reply["message"])
        ]
        return reply["success"], told[0] if told else {}, reply["message"]

    def ask(self, **request: Any) -> dict[str, Any]:
        """One request over the channel of every rank at once: the answer of one that refused, or of the slowest."""
        paths = sorted((self._root / ".refitd" / "engines").glob("*.sock"))
        with ThreadPoolExecutor(len(paths)) as pool:
            replies = [reply for reply in pool.map(lambda path: ask(path, request), paths) if reply is not None]
        return max(replies, key=lambda reply: (not reply["ok"], reply.get("ms", 0.0)))

    def prepare(self, path: Path, check: str = "bytes") -> dict[str, Any]:
        """As the service does while the engine serves."""
        reply = self.ask(do="prepare", path=str(path.relative_to(self._root)), check=check)
        assert reply["ok"], reply
        return reply

    def generate(self, tokens: int = 16, text: str = "hello world", **more: Any) -> list[int]:
        """Greedily."""
        params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return self.post("/generate", text=text, sampling_params=params, **more).json()["output_ids"]


def ask(path: Path, request: dict[str, Any]) -> dict[str, Any] | None:
    """One request to one rank; None where nobody listens any more."""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(60)
        try:
            line.connect(str(path))
        except ConnectionRefusedError:
            return None
        line.sendall(json.dumps(request).encode() + b"\n")
        with line.makefile("rb") as reply:
            return json.loads(reply.readline())
