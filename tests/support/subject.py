"""An engine server under test, and the adapter that speaks to it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from refitd.engine.port import Refit, Stage, Target
from refitd.engine.sglang.adapter import SglangEngine

from .forged import files_of, version_of
from .servers import ADMIN_KEY, API_KEY, EngineServer

PROMPT = [5, 6, 7]


def ignore_stage(_: Stage) -> None:
    """For refits whose stages do not matter."""


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
    def careless(self) -> bool:
        """Whether it makes SGLang's mistakes."""
        return self.kind in {"embedded-defects", "sglang"}

    @property
    def takes_nan(self) -> bool:
        """Whether it loads what is not a number. The plugin leaves values to the service where files are the same."""
        return self.kind != "embedded"

    @property
    def other_fingerprint(self) -> str:
        """Of contents that nobody ever had."""
        return "xxh3:0" if self.root is None else "plugin:xxh3:0"

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

    async def info(self) -> dict[str, Any]:
        async with self.http() as http:
            return (await http.get("/model_info")).raise_for_status().json()

    def http(self, within: float = 60.0) -> httpx.AsyncClient:
        """A client of the kind that rollouts use."""
        headers = {"Authorization": f"Bearer {API_KEY}"}
        return httpx.AsyncClient(base_url=self.server.url, headers=headers, timeout=within, trust_env=False)

    def adapter(self, **options: Any) -> SglangEngine:
        given = {"api_key": API_KEY, "admin_key": ADMIN_KEY, "root": self.root}
        return SglangEngine(self.server.url, **{**given, **options})
