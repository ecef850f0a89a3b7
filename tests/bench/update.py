"""The whole update of a tiny model beside the loop that everybody writes by hand, equally durable on both sides."""

import os
import shutil
import time
from pathlib import Path

import httpx
import models
import stack
from figures import Figure, percentile, spread
from safetensors.torch import save_file

from refitd_client import WeightPublisher

ROUNDS = 100


def update(folder: Path) -> list[Figure]:
    """What refitd adds to the hand-written loop, round by round in turns."""
    base = models.make(folder / "base")
    weights = models.steps(base, 4)
    root, hand = folder / "root", folder / "hand"
    root.mkdir()
    with (
        stack.engines(base, folder, 2) as (ours, theirs),
        stack.refitd(root, folder, [ours], "--base-model", str(base)) as (_, service),
        WeightPublisher(root, "bench", service_url=service) as publisher,
        httpx.Client(base_url=theirs, trust_env=False) as http,
    ):
        by_refitd: list[float] = []
        by_hand: list[float] = []
        for step in range(1, ROUNDS + 1):
            started = time.monotonic()
            publisher.publish(weights[step % 4], step=step).wait(timeout=30)
            by_refitd.append((time.monotonic() - started) * 1000)
            started = time.monotonic()
            _by_hand(http, hand / f"step-{step}", weights[step % 4], step)
            by_hand.append((time.monotonic() - started) * 1000)
    added = percentile(by_refitd, 50) - percentile(by_hand, 50)
    detail = {
        "refitd": spread(by_refitd),
        "by hand": spread(by_hand),
        "ratio of p50": round(percentile(by_refitd, 50) / percentile(by_hand, 50), 2),
    }
    return [
        Figure(
            name="added to the hand-written update, p50", measured=round(added, 3), unit="ms", limit=30, detail=detail
        )
    ]


def _by_hand(http: httpx.Client, folder: Path, weights: models.Weights, step: int) -> None:
    """save_file, POST, poll, rmtree; and the fsyncs that refitd's publisher does."""
    folder.mkdir(parents=True)
    file = folder / "model.safetensors"
    save_file(weights, file, metadata={"format": "pt"})
    for path in (file, folder, folder.parent):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    order = {"model_path": str(folder), "weight_version": str(step), "load_format": "auto"}
    http.post("/update_weights_from_disk", json=order, timeout=30).raise_for_status()
    while http.get("/model_info").json()["weight_version"] != str(step):
        time.sleep(0.001)
    shutil.rmtree(folder)
