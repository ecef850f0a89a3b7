"""A real vLLM on the CPU, and the adapter that speaks to it."""

import json
import os
import re
import shutil
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
from safetensors.torch import load_file, save_file

from refitd.engine.port import Reached, Refit, Target
from refitd.engine.vllm.adapter import VllmEngine
from refitd_client.contract.plugin import Answer, answers_in

from .servers import API_KEY, VLLM_VENV, Server, ServerError, free_port
from .subject import ignore_stage

REPOSITORY = Path(__file__).resolve().parents[2]
KIT = REPOSITORY / "tests/vllm"
FAULTS = "support.vllm_faults:register"
PROMPT = [5, 6, 7]
WIDTH = 128  # of the models: vLLM's attention on the CPU takes heads of 32 elements and more


class VllmServer(Server):
    """A vLLM in the environment that REFITD_VLLM_VENV names. Its first answer takes some seconds more."""

    name = "vllm"
    ready = re.compile(rb"Application startup complete")

    def __init__(self, folder: Path, model: Path, *flags: str, **environment: str) -> None:
        super().__init__(folder)
        if VLLM_VENV is None:
            raise ServerError("REFITD_VLLM_VENV is not set: run `make vllm`")
        self.model = model
        self.port = free_port()
        self._flags = flags
        self._environment = environment

    def command(self, port: int) -> Sequence[str]:
        venv = Path(VLLM_VENV or "").absolute()
        return [str(KIT / "serve"), str(venv), str(self.model), str(port), "--api-key", API_KEY, *self._flags]

    def environment(self) -> dict[str, str]:
        return super().environment() | self._environment

    def start(self) -> Self:
        """Start it and wait until it is up. It says so a moment before it listens."""
        super().start()
        with httpx.Client(transport=httpx.HTTPTransport(retries=8), timeout=60.0, trust_env=False) as http:
            http.get(f"{self.url}/health").raise_for_status()
        return self

    @property
    def workers(self) -> list[psutil.Process]:
        """The processes that hold the weights."""
        found = [each for each in psutil.Process(self.pid).children(recursive=True) if "Worker" in each.name()]
        if not found:
            raise ServerError(f"{self.name} has no worker; the end of {self.log}:\n{self.tail()}")
        return found

    @contextmanager
    def frozen(self) -> Generator[None]:
        """Stop the processes that hold the weights: what is sent to them meanwhile waits."""
        workers = self.workers
        for worker in workers:
            worker.suspend()
        try:
            yield
        finally:
            for worker in workers:
                worker.resume()


class PluggedVllm(VllmServer):
    """A vLLM as if refitd were installed in its environment, with a plugin of the tests that makes loads fail."""

    name = "vllm-plugged"

    def __init__(self, folder: Path, model: Path, *flags: str, root: Path, **environment: str) -> None:
        super().__init__(folder, model, *flags, **environment)
        self.root = root
        self._fault = folder / "fault"
        self._site = folder / "site"
        for name, entry in (("refitd", "refitd_vllm.plugin:register"), ("refitd-faults", FAULTS)):
            info = self._site / f"{name.replace('-', '_')}-0.1.0.dist-info"
            info.mkdir(parents=True, exist_ok=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
            (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {entry}\n")

    def environment(self) -> dict[str, str]:
        folders = [self._site, *(REPOSITORY / name for name in ("client", "service", "tests"))]
        path = os.pathsep.join(str(folder) for folder in folders)
        mine = {"PYTHONPATH": path, "FAULT_FILE": str(self._fault), "REFITD_VLLM_ROOT": str(self.root)}
        return super().environment() | mine

    def fail(self, after: int, rank: int = 0) -> None:
        """Let the next load of a rank fail after so many tensors."""
        Path(f"{self._fault}.{rank}").write_text(str(after))

    def call(self, method: str, **arguments: Any) -> list[dict[str, Any]]:
        """Call a method of each worker."""
        order = {"method": method, "kwargs": arguments}
        reply = httpx.post(f"{self.url}/collective_rpc", json=order, timeout=120.0, trust_env=False)
        assert reply.status_code == 200, reply.text
        return reply.json()["results"]

    def update(self, path: Path) -> list[Answer]:
        """One update that the plugin carries out, paused as the service does; what each rank answers."""
        httpx.post(f"{self.url}/pause?mode=keep", timeout=120.0, trust_env=False).raise_for_status()
        replies = self.call("refitd_update", path=str(path))
        assert all(reply["ok"] for reply in replies), replies
        for route in ("reset_prefix_cache?reset_running_requests=true", "resume"):
            httpx.post(f"{self.url}/{route}", timeout=120.0, trust_env=False).raise_for_status()
        return [answer for reply in replies for answer in answers_in(reply["message"])]


class VllmSubject:
    """A vLLM server under test, and the adapter that speaks to it."""

    def __init__(self, server: VllmServer, models: Path) -> None:
        self.server = server
        self.models = models
        self.engine = self.adapter()

    def adapter(self, **options: Any) -> VllmEngine:
        """Another adapter to the same server, which has asked nothing yet."""
        return VllmEngine(self.server.url, **{"api_key": API_KEY, **options})

    def path(self, model: str) -> Path:
        return self.models / model

    def target(self, model: str, label: str, **known: Any) -> Target:
        return Target(path=str(self.path(model)), label=label, **known)

    async def refit(self, model: str, label: str, **known: Any) -> Refit:
        return await self.engine.refit(self.target(model, label, **known), ignore_stage)

    async def label(self) -> str | None:
        """The label that an adapter sees which has asked nothing yet."""
        seen = await self.adapter().probe()
        return seen.weight_version if isinstance(seen, Reached) else None

    async def answer(self, within: float = 60.0) -> list[int]:
        """What it generates greedily."""
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 16, "ignore_eos": True, "return_token_ids": True}
        async with self.http(within) as http:
            reply = await http.post("/v1/completions", json=body)
            return reply.raise_for_status().json()["choices"][0]["token_ids"]

    def begun_checkpoint(self) -> Path:
        """model_b in two shards, the second of which is cut off in the middle of a layer's gate and up projections."""
        folder = self.models / "b_begun"
        if not folder.exists():
            shutil.copytree(self.path("model_b"), folder)
            weights = load_file(folder / "model.safetensors")
            (folder / "model.safetensors").unlink()
            first = [name for name in weights if name.endswith("gate_proj.weight")]
            shards = {
                "model-1.safetensors": first,
                "model-2.safetensors": [name for name in weights if name not in first],
            }
            for shard, names in shards.items():
                save_file({name: weights[name] for name in names}, folder / shard, metadata={"format": "pt"})
            os.truncate(folder / "model-2.safetensors", 3000)
            named = {name: shard for shard, names in shards.items() for name in names}
            (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": named}))
        return folder

    async def post(self, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """Call the server past the adapter."""
        async with self.http() as http:
            return await http.post(path, json=body or {})

    async def reload(self, path: Path) -> httpx.Response:
        """vLLM's own reload, past the adapter."""
        order = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        return await self.post("/collective_rpc", order)

    def http(self, within: float = 60.0) -> httpx.AsyncClient:
        """A client of the kind that rollouts use."""
        headers = {"Authorization": f"Bearer {API_KEY}"}
        return httpx.AsyncClient(base_url=self.server.url, headers=headers, timeout=within, trust_env=False)
