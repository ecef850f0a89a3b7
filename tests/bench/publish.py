"""Publishing half a gigabyte beside safetensors' own `save_file` with the same syncs, in memory where there is room.

The slots are handed back by the service's own code, called here: what is measured is the trainer's side.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from figures import Figure, percentile, spread
from safetensors.torch import save_file

from refitd.reclaim import slots, trash
from refitd.root.handle import Identity, root_at
from refitd.root.scan import Discarded
from refitd_client import WeightPublisher

BYTES = 512 * 10**6
TENSORS = 64
ROUNDS = 15
WARM = 5  # until every slot has come round, and is mapped
RUN = "bench"
MEMORY = Path("/dev/shm")  # noqa: S108 - a file system in memory

Weights = dict[str, torch.Tensor]


def publish(folder: Path) -> list[Figure]:
    """Each way to publish, round by round in turns with the hand-written one."""
    room = MEMORY if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 8 * BYTES else folder
    with tempfile.TemporaryDirectory(prefix="refitd-bench-", dir=room) as name:
        return _publish(Path(name))


def _publish(folder: Path) -> list[Figure]:
    weights = [_weights(seed) for seed in range(2)]
    took: dict[str, list[float]] = {"save_file": [], "fresh": [], "slot": [], "staged": []}
    with WeightPublisher(_root(folder / "fresh"), RUN) as fresh, WeightPublisher(_root(folder / "slots"), RUN) as slot:
        for step in range(1, ROUNDS + WARM + 1):
            state = weights[step % 2]
            samples = {
                "save_file": _timed(lambda state=state: _by_hand(folder / "hand", state)),
                "fresh": _timed(lambda state=state, step=step: fresh.publish(state, step=step)),
                "slot": _timed(lambda state=state, step=step: slot.publish(state, step=2 * step)),
            }
            shutil.rmtree(folder / "hand")
            shutil.rmtree(folder / "fresh" / RUN / f"v{step:06d}")
            _hand_back(folder / "slots", 2 * step)
            samples["staged"] = _held(slot, state, 2 * step + 1)
            _hand_back(folder / "slots", 2 * step + 1)
            if step > WARM:
                for way, sample in samples.items():
                    took[way].append(sample)
    return _figures(took)


def _figures(took: dict[str, list[float]]) -> list[Figure]:
    by_hand = percentile(took["save_file"], 50)
    detail = {
        way: spread(samples) | {"GB/s": round(BYTES / percentile(samples, 50) / 1e6, 2)}
        for way, samples in took.items()
    }
    limits = {
        "slot": ("into a slot", 0.5),
        "fresh": ("into new files", 1.0),
        "staged": ("into a slot, trainer held", 0.5),
    }
    return [
        Figure(
            name=f"publish 0.5 GB {what}, beside save_file and the same syncs, p50",
            measured=round(percentile(took[way], 50) / by_hand, 3),
            unit="x",
            limit=limit,
            detail={"save_file": detail["save_file"], way: detail[way]},
        )
        for way, (what, limit) in limits.items()
    ]


def _weights(seed: int) -> Weights:
    chance = torch.Generator().manual_seed(seed)
    shape = (TENSORS, BYTES // TENSORS // 2 // 1000, 1000)
    values = torch.randn(shape, generator=chance).to(torch.bfloat16)
    return {f"layers.{number}.weight": values[number].clone() for number in range(TENSORS)}


def _root(folder: Path) -> Path:
    (folder / ".refitd").mkdir(parents=True)
    return folder


def _timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return (time.perf_counter() - began) * 1000


def _held(publisher: WeightPublisher, state: Weights, step: int) -> float:
    """How long the trainer waits; what goes on in the background is waited for afterwards."""
    began = time.perf_counter()
    publication = publisher.publish(state, step=step, block="staged")
    held = (time.perf_counter() - began) * 1000
    publication.committed()
    return held


def _by_hand(folder: Path, weights: Weights) -> None:
    """A new file each time, as trainers save, and the fsyncs that refitd's publisher does."""
    folder.mkdir(parents=True)
    file = folder / "model.safetensors"
    save_file(weights, file, metadata={"format": "pt"})
    for path in (file, folder, folder.parent):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def _hand_back(root: Path, step: int) -> None:
    """What the service does with a version that nobody needs any more."""
    path = f"{RUN}/v{step:06d}"
    with root_at(root) as handle:
        found = trash.examine(handle, path)
        assert isinstance(found, Identity), found
        discarded = trash.discard(handle, path, found)
        assert isinstance(discarded, Discarded), discarded
        slot = slots.hand_back(handle, discarded, RUN)
        assert isinstance(slot, slots.Slot), slot
        trash.empty(handle)
