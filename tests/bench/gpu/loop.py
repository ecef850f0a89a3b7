"""The whole way with a real SGLang: publish, reload, verify, resume; beside the loop that everybody has today.

Today's loop comes first, before the service is there: it would see to it that the engine goes back to what it knows.
"""

import shutil
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import torch
from root import RUN, fresh_root
from rows import Row, row
from safetensors.torch import save_file
from setting import Setting
from shapes import Weights, change, loaded
from stack import refitd

from refitd_client import PublishOptions, RefitClient, WeightPublisher

WARM = 8  # until each of the slots that take turns has been handed back once, and is registered
PATIENCE = 120.0  # seconds


def loop(setting: Setting) -> list[Row]:
    """Both loops, each with weights that differ every time."""
    weights = loaded(setting.engine_model)
    today = _today(setting, weights, setting.engine)
    whole, held, service = _refitd(setting, weights, setting.engine, setting.engine_model)
    name = setting.engine_model.name
    by_hand = row(
        "loop", name, "today: save_file, reload, rmtree", [sum(each.values()) for each in today], stages=today
    )
    limit = min(750.0, by_hand.p50 / 4)
    return [
        by_hand,
        row("loop", name, "refitd: publish, reload, verify, resume", whole, limit=limit, stages=service),
        row("loop", name, "refitd: of that the trainer is held (staged)", held),
    ]


def _today(setting: Setting, weights: Weights, engine: str) -> list[dict[str, float]]:
    samples: list[dict[str, float]] = []
    with httpx.Client(base_url=engine, timeout=PATIENCE, trust_env=False) as http:
        for number in range(2 + setting.rounds):
            change(weights, 0.01)
            folder = setting.folder / f"today{number}"
            folder.mkdir()
            sample: dict[str, float] = {}
            _lap(sample, "save_file", lambda folder=folder: save_file(weights, folder / "model.safetensors"))
            _lap(sample, "reload", lambda folder=folder, number=number: _reload(http, folder, number))
            _lap(sample, "rmtree", lambda folder=folder: shutil.rmtree(folder))
            samples.append(sample)
    return samples[2:]


def _reload(http: httpx.Client, folder: Path, number: int) -> None:
    order = {"model_path": str(folder), "weight_version": str(number), "load_format": "auto"}
    answer: dict[str, Any] = http.post("/update_weights_from_disk", json=order).raise_for_status().json()
    if not answer["success"]:
        raise RuntimeError(f"the engine did not take {folder}: {answer['message']}")


def _refitd(
    setting: Setting, weights: Weights, engine: str, model: Path
) -> tuple[list[float], list[float], list[dict[str, float]]]:
    whole: list[float] = []
    held: list[float] = []
    parts: list[dict[str, float]] = []
    steps = count(1)
    with (
        fresh_root(setting.folder) as root,
        refitd(root, setting.folder, [engine], "--base-model", str(model), "--keep-last", "1") as (_, url),
        WeightPublisher(root, RUN, url, options=PublishOptions(base_model=model, fingerprints=True)) as publisher,
        RefitClient(url) as client,
    ):
        for number in range(WARM + setting.rounds):
            change(weights, 0.01)
            torch.cuda.synchronize()
            began = time.perf_counter()
            publication = publisher.publish(weights, step=next(steps), block="staged")
            held.append((time.perf_counter() - began) * 1000)
            publication.wait(timeout=PATIENCE)
            whole.append((time.perf_counter() - began) * 1000)
            timings = publication.committed().timings | client.version(publication.version_id).timings
            if number >= WARM:
                parts.append(timings)
    return whole[WARM:], held[WARM:], parts


def _lap(sample: dict[str, float], name: str, act: Callable[[], object]) -> None:
    began = time.perf_counter()
    act()
    sample[name] = (time.perf_counter() - began) * 1000
