"""A vLLM of a few lines in this process: HTTP by script before a model that really loads.

Stock, each load is read into the model's parameters. With refitd inside, each rank has the plugin as it is, and a
channel in the root.
"""

import hashlib
import json
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch.distributed import HashStore

from refitd_plugin.update import ranks as ranks_module

from .mini_sglang import TinyModel, Updater, tiny_weights, values
from .plugged_mini import Rank, wait_for
from .scripted_server import Step, answer, serve
from .scripted_vllm import SHAPE, ScriptedVllm, config, error

_BY_FRONT = frozenset({"/health", "/version", "/server_info"})


@dataclass
class MiniVllm(ScriptedVllm):
    """`load_seconds`: a load takes at least so long, and ends whether its caller is there or not; it ends once it
    `may_load`.
    """

    members: list[Rank] = field(default_factory=list[Rank])
    load_seconds: float = 0.0
    engine: threading.Lock = field(default_factory=threading.Lock)  # it does one call at a time
    may_load: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.may_load.set()

    def work(self, path: str, whole: str, body: dict[str, Any]) -> Step:
        """See `ScriptedVllm`."""
        if path in _BY_FRONT:
            return super().work(path, whole, body)
        with self.engine:
            return super().work(path, whole, body)

    def holds(self, seed: int) -> bool:
        """Whether every rank holds its part of the weights of a seed, and nothing else."""
        return all(rank.holds(seed) for rank in self.members)

    def _told(self, path: str) -> Any:
        if path != "/weight_checker":
            return super()._told(path)
        held = [values(rank.model) for rank in self.members]
        return {
            "checksums": {f"tp{rank}.{name}": _digest(each[name]) for rank, each in enumerate(held) for name in each}
        }

    def _call(self, body: dict[str, Any]) -> Step:
        match body["method"]:
            case "reload_weights":
                path = body["kwargs"]["weights_path"]
                done = self._loaded(lambda rank: Updater.update_weights_from_disk(rank.updater, path, "auto"))
                return answer(200, {"results": [None] * len(done)}) if all(ok for ok, _ in done) else error(500, SHAPE)
            case "refitd_update":
                path = body["kwargs"]["path"]
                said = [message for _, message in self._loaded(lambda rank: rank.update(path))]
                return answer(200, {"results": [{"ok": True, "message": each, "reason": ""} for each in said]})
            case _:
                return super()._call(body)

    def _loaded(self, load: Any) -> list[tuple[bool, str]]:
        time.sleep(self.load_seconds)
        self.may_load.wait(60.0)
        with ThreadPoolExecutor(len(self.members)) as pool:
            return list(pool.map(load, self.members))


def _digest(numbers: list[float]) -> str:
    return hashlib.sha256(json.dumps(numbers).encode()).hexdigest()


@contextmanager
def mini_vllm(
    folder: Path,
    *,
    root: Path | None = None,
    size: int = 1,
    kind: type[TinyModel] = TinyModel,
    **state: Any,
) -> Generator[MiniVllm]:
    """One that was started on the weights of seed 0.

    Args:
        folder: for its start-up model.
        root: where its channels are; None for a stock one.
        size: its ranks.
        kind: of their models.
        state: of `MiniVllm`.
    """
    startup = folder / "startup"
    startup.mkdir(exist_ok=True)
    if root is not None:
        (root / ".refitd").mkdir(parents=True, exist_ok=True)
    save_file(tiny_weights(0), startup / "model.safetensors")
    told = config(tensor_parallel_size=size)
    told["vllm_config"]["model_config"]["model"] = str(startup)
    launch = {"port": 0, "random_seed": int(told["vllm_config"]["instance_id"])}
    store = HashStore()
    with serve() as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks_module, "default_store", lambda: store)
        members = [Rank(root, startup, rank, size, kind, **launch) for rank in range(size)]
        for rank in members if root is not None else ():
            wait_for(rank.socket)
        engine = MiniVllm(server, told=told, ranks=size, members=members, **state)
        server.steps.append(engine.step)
        yield engine
