"""verl's own adapters for SGLang and vLLM, on what the backend hands a rollout worker. Prints one JSON document.

    python verl_adapters.py

SGLang and vLLM themselves are mocks: what counts is which of their calls the adapters make.
"""

import asyncio
import importlib.metadata
import json
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

from refitd_client.trainers.verl import RefitCheckpointEngine


class Mocked(MetaPathFinder, Loader):
    """Every module of SGLang and vLLM is there, and has whatever is imported from it."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_mocked = fullname.partition(".")[0] in {"sglang", "vllm"}
        return ModuleSpec(fullname, self, is_package=True) if is_mocked else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        made: Any = ModuleType(spec.name)
        made.__getattr__ = lambda name: MagicMock(unsafe=True)
        made.__version__ = "0.32.0"
        return made

    def exec_module(self, module: ModuleType) -> None:
        """It has no code."""


sys.meta_path.insert(0, Mocked())
found = importlib.metadata.version
importlib.metadata.version = lambda name: "0.32.0" if name == "vllm" else found(name)


class Server:
    """The Ray actor of a server: what was called of it. Every call is one that is awaited."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        async def remote(*args: Any, **_: Any) -> None:
            self.calls.append(f"{name}{args}")

        return MagicMock(remote=remote)


def adapter_for(name: str, server: Server) -> Any:
    if name == "sglang":
        from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter

        adapter = ServerAdapter.__new__(ServerAdapter)
        adapter._pd_role, adapter._has_server, adapter._engine = None, True, server
        adapter.device_mesh, adapter.server_actor = {"infer_tp": MagicMock(get_local_rank=lambda: 0)}, server
        return adapter
    from verl.workers.rollout.vllm_rollout import ServerAdapter

    adapter = ServerAdapter.__new__(ServerAdapter)
    adapter.server_handle, adapter.use_shm = server, False
    adapter._has_server, adapter.rollout_rank = True, 0
    return adapter


def main() -> None:
    engine = RefitCheckpointEngine(1 << 20, root="/nowhere", run="exp", service_url="http://127.0.0.1:9")
    report = {}
    for name in ("sglang", "vllm"):
        server = Server()
        weights = engine.receive_weights(global_steps=7)
        updated = adapter_for(name, server).update_weights(weights, global_steps=7, wire_format=engine.wire_format)
        asyncio.run(updated)
        report[name] = server.calls
    print("REPORT " + json.dumps(report), flush=True)


main()
