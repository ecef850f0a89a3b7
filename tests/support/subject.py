"""An engine server under test, and the adapter that speaks to it."""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from refitd.engine.port import EnginePort, Refit, Stage, Target

from .engines import sglang_engine
from .forged import files_of, version_of
from .habits import HABITS, Habits
from .servers import ADMIN_KEY, API_KEY, EngineServer

PROMPT = [5, 6, 7]


def ignore_stage(_: Stage) -> None:
    """For refits whose stages do not matter."""


@dataclass(frozen=True, slots=True)
class Streamed:
    """What is known of an answer at its end. `label`: of the version that gave it, where the engine says that."""

    tokens: int
    ended: str | None
    label: str | None


@dataclass
class Subject:
    """An engine server under test, and the adapter that speaks to it. `root`, with versions: it has the plugin."""

    kind: str
    server: EngineServer
    models: Path
    root: Path | None = None

    def __post_init__(self) -> None:
        self.engine = self.adapter()

    @property
    def habits(self) -> Habits:
        """What its kind does in its own way."""
        return HABITS[self.kind]

    def path(self, model: str) -> Path:
        """Where the engine finds a model, one that is not there too."""
        if self.root is None or not (self.models / model).is_dir():
            return self.models / model
        return version_of(self.root, self.models / model)

    def target(self, model: str, label: str, **known: Any) -> Target:
        path = self.path(model)
        files = None if self.root is None or not path.is_dir() else files_of(self.root, path)
        return Target(path=str(path), label=label, files=files, **known)

    async def refit(self, model: str, label: str, **known: Any) -> Refit:
        return await self.engine.refit(self.target(model, label, **known), ignore_stage)

    async def answer(self, within: float = 60.0) -> list[int]:
        """What it generates greedily."""
        params = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
        async with self.http(within) as http:
            reply = await http.post("/generate", json={"input_ids": PROMPT, "sampling_params": params})
            return reply.raise_for_status().json()["output_ids"]

    async def stream(self, tokens: int, begun: asyncio.Event) -> Streamed:
        """Ask for a long answer; say when it has begun."""
        meta = (await self.last_event(tokens, begun))["meta_info"]
        return Streamed(meta["completion_tokens"], meta["finish_reason"]["type"], meta["weight_version"])

    async def last_event(self, tokens: int, begun: asyncio.Event) -> dict[str, Any]:
        """Ask for a long answer of which the engine says which version generated which tokens; its last event."""
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        return await self.events("/generate", {"input_ids": PROMPT, "sampling_params": params, "stream": True}, begun)

    async def events(self, route: str, body: dict[str, Any], begun: asyncio.Event) -> dict[str, Any]:
        """Follow a stream to its end; its last event."""
        last: dict[str, Any] = {}
        async with self.http() as http, http.stream("POST", route, json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    last = json.loads(line.removeprefix("data: "))
                    begun.set()
        return last

    async def named(self) -> tuple[str, str]:
        """The path and the label of what it serves, asked past the adapter where the server tells both."""
        async with self.http() as http:
            info = (await http.get("/model_info")).raise_for_status().json()
        return info["model_path"], info["weight_version"]

    def agree(self, some: str | None, other: str | None) -> bool:
        """Whether two fingerprints are of the same contents."""
        return some is not None and some == other

    def http(self, within: float = 60.0) -> httpx.AsyncClient:
        """A client of the kind that rollouts use."""
        headers = {"Authorization": f"Bearer {API_KEY}"}
        return httpx.AsyncClient(base_url=self.server.url, headers=headers, timeout=within, trust_env=False)

    def adapter(self, **options: Any) -> EnginePort:
        """Another adapter to the same server, which has asked nothing yet."""
        given = {"api_key": API_KEY, "admin_key": ADMIN_KEY, "root": self.root}
        return sglang_engine(self.server.url, **{**given, **options})
