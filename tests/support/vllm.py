"""A real vLLM on the CPU, and the adapter that speaks to it."""

import asyncio
import json
import os
import re
import shutil
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
from safetensors.torch import load_file, save_file

from refitd.engine.fingerprints import alike
from refitd.engine.port import Reached
from refitd.engine.transaction import ServerEngine
from refitd_client.contract.naming import ROOT_NAME, SERVICE_FOLDER
from refitd_client.contract.plugin import Answer, answers_in

from .engine_template import ForkedEngine, template
from .engines import vllm_engine
from .servers import API_KEY, VLLM_VENV, EngineServer, ServerError, free_port
from .subject import PROMPT, Streamed, Subject

REPOSITORY = Path(__file__).resolve().parents[2]
_BIN = Path(VLLM_VENV or "").absolute() / "bin"
FAULTS = "support.vllm_faults:register"
WIDTH = 128  # of the models: vLLM's attention on the CPU takes heads of 32 elements and more
_BIND = "VLLM_CPU_OMP_THREADS_BIND"
_TWO = ["--tensor-parallel-size", "2"]
BY_CLASS = ["--worker-extension-cls", "refitd_vllm.Worker"]
_IN_PLACE = {"UNPACKED": "1"}  # linear layers are not repacked, as on a GPU: loads are copies that are learned
FLAGS = [
    "--host",
    "127.0.0.1",
    "--dtype",
    "bfloat16",
    "--max-model-len",
    "1024",
    "--max-num-seqs",
    "8",
    "--enforce-eager",
]
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
    _BIND: "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
# How each kind is started.
STARTED: dict[str, tuple[list[str], dict[str, str]]] = {
    "vllm": ([], {}),
    "vllm-two-ranks": (_TWO, {_BIND: "0|1"}),
    "vllm-plugged": ([], {}),
    "vllm-plugged-two-ranks": (_TWO, {_BIND: "0|1"} | _IN_PLACE),
    "vllm-plugged-in-place": ([], _IN_PLACE),
    "vllm-plugged-two-ranks-repacked": (_TWO, {_BIND: "0|1"}),
    "vllm-plugged-by-class": (BY_CLASS, {}),
    "vllm-plugged-by-class-two-ranks": ([*_TWO, *BY_CLASS], {_BIND: "0|1"} | _IN_PLACE),
}


class VllmServer(EngineServer):
    """A vLLM in the environment that REFITD_VLLM_VENV names. Its first answer takes some seconds more."""

    name = "vllm"
    ready = re.compile(rb"Application startup complete")

    def __init__(self, folder: Path, model: Path, *flags: str, **environment: str) -> None:
        super().__init__(folder, model)
        if VLLM_VENV is None:
            raise ServerError("REFITD_VLLM_VENV is not set: run `make vllm`")
        self.port = free_port()
        self._flags = ["--api-key", API_KEY, *flags]
        self._environment = environment

    def command(self, port: int) -> Sequence[str]:
        return ["vllm", "serve", str(self.model), "--port", str(port), *FLAGS, *self._flags]

    def environment(self) -> dict[str, str]:
        path = f"{_BIN}{os.pathsep}{os.environ['PATH']}"
        return super().environment() | ENVIRONMENT | {"PATH": path} | self._environment

    def _begun(self) -> ForkedEngine:
        _, *words = self.command(self.port)
        return ForkedEngine(template(_BIN / "python", REPOSITORY / "tests/vllm/template"), words, self.environment())

    def stop(self) -> None:
        """SIGKILL: it takes seconds to end by itself, and has nothing that is looked at afterwards."""
        self.kill()

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

    @property
    def scheduler(self) -> psutil.Process:
        """One of them."""
        return self.workers[0]

    @contextmanager
    def frozen(self, *, all_of_them: bool = True) -> Generator[None]:
        """Stop the processes that hold the weights, or the last of them: what is sent to them meanwhile waits."""
        workers = self.workers if all_of_them else self.workers[-1:]
        for worker in workers:
            worker.suspend()
        try:
            yield
        finally:
            for worker in workers:
                with suppress(psutil.NoSuchProcess):
                    worker.resume()


class PluggedVllm(VllmServer):
    """A vLLM as if refitd were installed in its environment, with a plugin of the tests that makes loads fail.

    One that names refitd's class has no plugin of refitd, and no variable that names the root.
    """

    name = "vllm-plugged"

    def __init__(self, folder: Path, model: Path, *flags: str, root: Path, **environment: str) -> None:
        super().__init__(folder, model, *flags, **environment)
        self.root = root
        self._fault = folder / "fault"
        self._site = folder / "site"
        entries = {"refitd": "refitd_vllm.plugin:register", "refitd-faults": FAULTS}
        self._by_class = BY_CLASS[0] in flags
        for name, entry in () if self._by_class else entries.items():
            info = self._site / f"{name.replace('-', '_')}-0.1.0.dist-info"
            info.mkdir(parents=True, exist_ok=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
            (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {entry}\n")

    def environment(self) -> dict[str, str]:
        folders = [self._site, *(REPOSITORY / name for name in ("client", "service", "tests"))]
        path = os.pathsep.join(str(folder) for folder in folders)
        mine = {"PYTHONPATH": path, "FAULT_FILE": str(self._fault)}
        return super().environment() | mine | ({} if self._by_class else {"REFITD_VLLM_ROOT": str(self.root)})

    def fail(self, after: int, rank: int = 0) -> None:
        """Let the next load of a rank fail after so many tensors."""
        Path(f"{self._fault}.{rank}").write_text(str(after))

    def refuse(self, rank: int = 0) -> None:
        """Let a rank refuse the next version."""
        Path(f"{self._fault}.{rank}.refuse").touch()

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


class OneVllm:
    """At most one vLLM at a time, of the kind that was asked for last: each takes 2 GB, and a minute to start."""

    def __init__(self, models: Path, folder: Callable[[str], Path]) -> None:
        self._models, self._folder = models, folder
        self._kind = ""
        self._server: VllmServer | None = None

    def of(self, kind: str) -> VllmServer:
        """The server of a kind, up: the one that runs, or one that is started in its place."""
        if kind != self._kind or self._server is None:
            self.stop()
            self._server, self._kind = self._made(kind), kind
        if not self._server.is_running:
            self._server.restart()
        if isinstance(self._server, PluggedVllm):  # the service of the next test has a journal of its own
            for name in (ROOT_NAME, "journal"):  # which root it is, and where its journal lies
                (self._server.root / SERVICE_FOLDER / name).unlink(missing_ok=True)
        return self._server

    def subject(self, kind: str) -> "VllmSubject":
        """The same as the tests see it."""
        server = self.of(kind)
        return VllmSubject(server, self._models, kind, server.root if isinstance(server, PluggedVllm) else None)

    def stop(self) -> None:
        """End the one that runs."""
        if self._server is not None:
            self._server.stop()
        self._server = None

    def _made(self, kind: str) -> VllmServer:
        flags, variables = STARTED[kind]
        folder, model = self._folder(kind), self._models / "model_a"
        if "plugged" not in kind:
            return VllmServer(folder, model, *flags, **variables)
        root = folder / "root"
        (root / ".refitd").mkdir(parents=True)
        return PluggedVllm(folder, model, *flags, root=root, **variables)


class VllmSubject(Subject):
    """A vLLM server under test, and the adapter that speaks to it: as to a stock one, unless it is given the root."""

    def __init__(self, server: VllmServer, models: Path, kind: str = "vllm", root: Path | None = None) -> None:
        super().__init__(kind, server, models, root)

    def adapter(self, **options: Any) -> ServerEngine:
        """Another adapter to the same server, which has asked nothing yet."""
        given = {"api_key": API_KEY, "root": self.root}
        return vllm_engine(self.server.url, **{**given, **options})

    async def named(self) -> tuple[str, str]:
        """The path that its adapter has in mind, since a server tells none, and the label that the server tells."""
        known = await self.engine.probe()
        assert isinstance(known, Reached)
        return known.model_path, await self.label() or ""

    async def label(self) -> str | None:
        """The label that an adapter sees which has asked nothing yet."""
        seen = await self.adapter().probe()
        return seen.weight_version if isinstance(seen, Reached) else None

    def agree(self, some: str | None, other: str | None) -> bool:
        """Whether two fingerprints are of the same contents: scores are never equal to the last digit."""
        return some is not None and other is not None and alike(some, other) is True

    async def answer(self, within: float = 60.0) -> list[int]:
        """What it generates greedily."""
        async with self.http(within) as http:
            reply = await http.post("/v1/completions", json=_question(16))
            return reply.raise_for_status().json()["choices"][0]["token_ids"]

    async def stream(self, tokens: int, begun: asyncio.Event) -> Streamed:
        """Ask for a long answer; say when it has begun."""
        count, ended = 0, None
        body = _question(tokens) | {"stream": True}
        async with self.http() as http, http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                    count += len(choice["token_ids"] or [])
                    ended = choice["finish_reason"] or ended
                    begun.set()
        return Streamed(count, ended, None)

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


def _question(tokens: int) -> dict[str, Any]:
    return {
        "prompt": PROMPT, "temperature": 0, "max_tokens": tokens, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
