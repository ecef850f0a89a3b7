"""A rollout of verl's whose servers are refitd's small CPU engine. It stands in for verl's SGLang servers.

Those need a GPU. The names of the Ray actors, their methods, and what the adapter does with an update are those of
verl's SGLang rollout, so that verl's own manager and workers run as they are.
"""

import re
import subprocess
import sys
from typing import Any

import httpx
import ray
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

NAME = "embedded"


class EmbeddedServer:
    """The Ray actor that has a server's process, as verl's `SGLangHttpServer`."""

    def __init__(self, config: Any, mode: RolloutMode, model: str, flags: tuple[str, ...]) -> None:
        self.config, self.rollout_mode = config, mode
        self.global_steps: int | None = None
        command = [sys.executable, "-m", "refitd_embedded", "--model-path", model, "--port", "0", *flags]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._port = 0

    async def launch_server(self) -> None:
        for line in self._process.stdout or ():
            if (found := re.search(r"ready on http://127\.0\.0\.1:(\d+)", line)) is not None:
                self._port = int(found[1])
                return
        raise RuntimeError("the engine has ended")

    def get_server_address(self) -> tuple[str, int]:
        return "127.0.0.1", self._port

    async def generate(self, prompt: list[int], tokens: int = 8) -> dict[str, Any]:
        """An answer, with the version that the engine names and the step that verl has noted."""
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        said = await self._post("/generate", {"input_ids": prompt, "sampling_params": params})
        label = said["meta_info"]["weight_version"]
        return {"tokens": said["output_ids"], "serves": label, "global_steps": self.global_steps}

    async def set_global_steps(self, global_steps: int) -> None:
        self.global_steps = global_steps

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        await self._post("/pause_generation", {"mode": "abort"})

    async def resume_generation(self) -> None:
        await self._post("/continue_generation", {})

    async def release_kv_cache(self) -> None:
        """As verl's servers with `free_cache_engine=False`."""

    async def resume_kv_cache(self) -> None:
        """As verl's servers with `free_cache_engine=False`."""

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self._port}", timeout=60, trust_env=False) as http:
            return (await http.post(path, json=body)).raise_for_status().json()


class EmbeddedReplica(RolloutReplica):
    """One server on a model's folder, as verl's `SGLangReplica`. `flags` are further ones of the engine's."""

    flags: tuple[str, ...] = ()

    async def launch_servers(self) -> None:
        name = f"sglang_server_{self.replica_rank}_0"  # the name by which the backend finds verl's servers
        actor = ray.remote(EmbeddedServer).options(name=name, num_cpus=0, max_concurrency=100)
        server = actor.remote(self.config, self.rollout_mode, self.model_config, self.flags)
        await server.launch_server.remote()
        self.servers = [server]


class Adapter(base.BaseRollout):
    """In verl's rollout worker. It does with an update what verl's SGLang adapter does in `_update_weights_delta`."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self._server = ray.get_actor(f"sglang_server_{replica_rank}_0")

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **_: Any
    ) -> None:
        assert wire_format == "delta_flush"
        for named, _is_last in weights:
            raise AssertionError(f"refitd writes into the server, and verl was handed {named!r}")
        await self._server.set_global_steps.remote(global_steps)

    async def resume(self, tags: list[str]) -> None:
        """Nothing was released."""

    async def release(self) -> None:
        """Nothing is released."""


base._ROLLOUT_REGISTRY[(NAME, "async")] = f"{__name__}.Adapter"
