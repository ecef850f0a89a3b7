"""One rank of an engine, with the plugin and SGLang's own flow, and versions for it. No server, no process."""

import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import save_file
from torch.distributed import HashStore

from refitd_client.contract.plugin import Answer, UpdateOutcome, answers_in
from refitd_plugin.settings import PluginSettings
from refitd_plugin.update import ranks
from refitd_sglang.plugin import Plugin, SglangLayout
from support.forged import Weights, fingerprints_of, sign, write_delta
from support.mini_sglang import TinyModel, Updater, expected, make_loader, tiny_weights, values


class Rank:
    """One rank of an engine that was started on `startup`, with the plugin."""

    def __init__(
        self,
        startup: Path,
        rank: int = 0,
        size: int = 1,
        wait: float = 30.0,
        device: str = "cpu",
        model: Any = None,
        **args: Any,
    ) -> None:
        self.model = TinyModel(rank, size).to(device) if model is None else model
        self.updater = Updater(
            model=self.model,
            model_config=SimpleNamespace(model_path=str(startup)),
            loader=make_loader(),
            tp_rank=rank,
            server_args=SimpleNamespace(tp_size=size, **args),
        )
        self.plugin = Plugin(
            SglangLayout("mini", Updater, self.updater.loader, inspect.signature(Updater.update_weights_from_disk)),
            PluginSettings(wait=wait),
        )
        assert self.stock(startup)[0]

    def stock(self, path: Path) -> tuple[bool, str]:
        return Updater.update_weights_from_disk(self.updater, str(path), "auto")

    def update(self, path: Path, load_format: str = "auto", **more: Any) -> tuple[bool, str]:
        hook: Callable[..., tuple[bool, str]] = self.plugin.update
        return hook(Updater.update_weights_from_disk, self.updater, str(path), load_format, **more)

    def answer(self, path: Path, **more: Any) -> Answer:
        ok, message = self.update(path, **more)
        (answer,) = answers_in(message)
        assert ok == (answer.outcome is UpdateOutcome.SERVED)
        return answer

    def holds(self, seed: int) -> bool:
        return values(self.model) == expected(tiny_weights(seed), self.model.rank, self.model.size)

    @property
    def engine(self) -> Any:
        return self.plugin.rank_of(self.updater).engine

    @property
    def path(self) -> str:
        return self.updater.model_config.model_path


def version(root: Path, step: int, weights: Weights | None = None, *, fingerprints: bool = False) -> Path:
    """A version as a publisher leaves it; its seed is its step."""
    weights = tiny_weights(step) if weights is None else weights
    folder = root / "run" / f"v{step:06d}"
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors")
    sign(folder, "run", step, fingerprints=fingerprints_of(weights) if fingerprints else None)
    return folder


def delta(root: Path, step: int, base: int, before: Weights, after: Weights, **more: Any) -> Path:
    """A delta from one version to another, as a publisher leaves it."""
    folder = root / "run" / f"v{step:06d}"
    write_delta(folder, "run", step, base, before, after, **more)
    return folder


class Breaking:
    """A loader that breaks off after some tensors: once for each number that it is given, in their order."""

    def __init__(self, model: TinyModel, *after: int) -> None:
        self._load, self._after = type(model).load_weights, list(after)
        model.__class__ = type("Breaking", (type(model),), {"load_weights": self._breaking()})

    def _breaking(self) -> Callable[..., None]:
        def load_weights(model: TinyModel, weights: Any) -> None:
            for number, item in enumerate(weights):
                if self._after and number == self._after[0]:
                    self._after.pop(0)
                    raise RuntimeError("CUDA out of memory")
                self._load(model, [item])

        return load_weights


def group(startup: Path, monkeypatch: pytest.MonkeyPatch, size: int = 2, wait: float = 30.0) -> list[Rank]:
    store = HashStore()
    monkeypatch.setattr(ranks, "default_store", lambda: store)
    return [Rank(startup, rank, size, wait) for rank in range(size)]


def together(members: list[Rank], path: Path) -> list[Answer]:
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(lambda rank: rank.answer(path), members))
