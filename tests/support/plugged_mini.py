"""The plugin as it is, behind HTTP and sockets as they are, in an SGLang of a few lines in this process.

All that is not real is SGLang: what its HTTP side answers is scripted, what its ranks do is `mini_sglang`'s.
"""

import inspect
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import save_file
from torch.distributed import HashStore

from refitd.engine.port import Target
from refitd_plugin.settings import PluginSettings
from refitd_plugin.update import ranks as ranks_module
from refitd_sglang.plugin import Plugin, SglangLayout

from .forged import files_of, fingerprints_of, sign
from .mini_sglang import TinyModel, Updater, expected, make_loader, tiny_weights, values
from .scripted_server import Step, answer, serve
from .scripted_sglang import ScriptedSglang, said
from .sockets import listens

SEED = 7
PORT = 30000


class Rank:
    """One rank that was started on the weights of seed 0, its channel in `root`. `fault`: as the setting."""

    def __init__(
        self,
        root: Path | None,
        startup: Path,
        rank: int,
        size: int,
        kind: type[TinyModel] = TinyModel,
        fault: str | None = None,
        **args: Any,
    ) -> None:
        self.model = kind(rank, size)
        named = {"tp_size": size, "port": PORT, "random_seed": SEED, **args}
        self.updater = Updater(
            model=self.model,
            model_config=SimpleNamespace(model_path=str(startup)),
            loader=make_loader(),
            tp_rank=rank,
            server_args=SimpleNamespace(**named),
        )
        signature = inspect.signature(Updater.update_weights_from_disk)
        self.plugin = Plugin(
            SglangLayout("mini", Updater, self.updater.loader, signature),
            PluginSettings(root=root, wait=30.0, on_host=True, fault=fault),
        )
        Updater.update_weights_from_disk(self.updater, str(startup), "auto")
        self.plugin.started(None, self.updater)

    def update(self, path: str) -> tuple[bool, str]:
        return self.plugin.update(Updater.update_weights_from_disk, self.updater, path, "auto")

    def holds(self, seed: int) -> bool:
        return values(self.model) == expected(tiny_weights(seed), self.model.rank, self.model.size)

    @property
    def engine(self) -> Any:
        return self.plugin.rank_of(self.updater).engine

    @property
    def socket(self) -> Path:
        channel = self.plugin.rank_of(self.updater)._channel
        return channel.root / ".refitd" / "engines" / channel.name


@dataclass
class PluggedMini(ScriptedSglang):
    """Scripted HTTP in front of ranks with the plugin."""

    members: list[Rank] = field(default_factory=list[Rank])

    def load(self) -> Step:
        order = self.bodies("/update_weights_from_disk")[-1]
        with ThreadPoolExecutor(len(self.members)) as pool:
            (ok, message), *_ = pool.map(lambda rank: rank.update(order["model_path"]), self.members)
        if not ok:
            return said(400, message)
        self.served = {"model_path": order["model_path"], "weight_version": order["weight_version"]}
        return said(200, f"{message} Weight version updated to {order['weight_version']}.")

    def _work(self, path: str) -> Step:
        if path == "/server_info":
            launch = {"port": PORT, "random_seed": SEED, "tp_size": max(1, len(self.members))}
            return answer(200, {"version": self.version, "model_path": self.launched} | launch)
        return super()._work(path)

    def holds(self, seed: int) -> bool:
        """Whether every rank holds its part of the weights of a seed, and nothing else."""
        return all(rank.holds(seed) for rank in self.members)


@contextmanager
def plugged_mini(root: Path, size: int = 1, **args: Any) -> Generator[PluggedMini]:
    """An engine with its channels open."""
    (root / ".refitd").mkdir(parents=True, exist_ok=True)
    startup = root.parent / "startup"
    startup.mkdir(exist_ok=True)
    save_file(tiny_weights(0), startup / "model.safetensors")
    store = HashStore()
    with serve() as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks_module, "default_store", lambda: store)
        members = [Rank(root, startup, rank, size, **args) for rank in range(size)]
        for rank in members:
            wait_for(rank.socket)
        engine = PluggedMini(server, launched=str(startup), members=members)
        server.steps.append(engine.step)
        yield engine


def wait_for(path: Path) -> None:
    """Wait until somebody listens there."""
    deadline = time.monotonic() + 30
    while not listens(path):
        assert time.monotonic() < deadline


def put(root: Path, step: int, *, fingerprints: bool = False) -> Path:
    """A version as a publisher leaves it; its seed is its step."""
    folder = root / "run" / f"v{step:06d}"
    folder.mkdir(parents=True)
    save_file(tiny_weights(step), folder / "model.safetensors")
    sign(folder, "run", step, fingerprints_of(tiny_weights(step)) if fingerprints else None)
    return folder


def target(root: Path, step: int, **more: Any) -> Target:
    """A version as the reconciler would give it to an engine."""
    path = root / "run" / f"v{step:06d}"
    return Target(**({"path": str(path), "label": str(step), "files": files_of(root, path)} | more))
