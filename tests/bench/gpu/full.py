"""Full versions: into new files, into slots, and how long the trainer is held; what they take of the GPU's memory."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from root import RUN, fresh_root, hand_back
from rows import Row, row, timed
from setting import Setting

from refitd_client import Publication, PublishOptions, WeightPublisher

WARM = 2  # until the slot has come round, and is registered


def full(setting: Setting) -> list[Row]:
    """With NaN refused and fingerprints named, as the issue's figures ask for; then without either."""
    rows = _published(setting, "", check_finite=True, fingerprints=True)
    rows += _published(setting, ", unchecked", check_finite=False, fingerprints=False)[1:]
    return [*rows, _memory(setting)]


def _published(setting: Setting, kind: str, *, check_finite: bool, fingerprints: bool) -> list[Row]:
    with (
        fresh_root(setting.folder) as root,
        WeightPublisher(
            root, RUN, options=PublishOptions(check_finite=check_finite, fingerprints=fingerprints)
        ) as publisher,
    ):
        new: list[float] = []
        for step in range(1, WARM + 1):
            took, version = _committed(publisher, setting, step)
            new.append(took)
            hand_back(root, version.path)
        committed: list[tuple[float, Publication]] = []
        for step in range(10, 10 + WARM + setting.rounds):
            committed.append(_committed(publisher, setting, step))
            hand_back(root, committed[-1][1].path)
        staged: list[tuple[float, float, Publication]] = []
        for step in range(100, 100 + WARM + setting.rounds):
            staged.append(_staged(publisher, setting, step))
            hand_back(root, staged[-1][2].path)
    model, copy = setting.model, setting.copy_ms
    committed, staged = committed[WARM:], staged[WARM:]
    return [
        row("full", model, f"new files{kind}", new[:1], note="the first of a publisher"),
        row(
            "full", model, f"slot, committed{kind}", [took for took, _ in committed], limit=1.5 * copy,
            stages=[version.timings for _, version in committed],
        ),
        row("full", model, f"slot, staged: trainer held{kind}", [held for held, _, _ in staged], limit=1.3 * copy),
        row(
            "full", model, f"slot, staged: committed{kind}", [done for _, done, _ in staged], limit=1.5 * copy,
            stages=[version.timings for _, _, version in staged],
        ),
    ]  # fmt: skip


def _committed(publisher: WeightPublisher, setting: Setting, step: int) -> tuple[float, Publication]:
    done: list[Publication] = []
    return timed(lambda: done.append(publisher.publish(setting.weights, step=step))), done[0]


def _staged(publisher: WeightPublisher, setting: Setting, step: int) -> tuple[float, float, Publication]:
    torch.cuda.synchronize()
    began = time.perf_counter()
    publication = publisher.publish(setting.weights, step=step, block="staged")
    held = time.perf_counter()
    done = publication.committed()
    return (held - began) * 1000, (time.perf_counter() - began) * 1000, done


def _memory(setting: Setting) -> Row:
    """What torch's allocator gave out at most while a recycled version was published, beyond the weights."""
    with (
        fresh_root(setting.folder) as root,
        WeightPublisher(root, RUN, options=PublishOptions(fingerprints=True)) as publisher,
    ):
        peaks = [peak(lambda step=step: _recycled(publisher, setting, root, step)) for step in range(1, 5)]
    return row("full", setting.model, "extra GPU memory", [each / 1e6 for each in peaks[2:]], unit="MB", limit=1.0)


def _recycled(publisher: WeightPublisher, setting: Setting, root: Path, step: int) -> None:
    hand_back(root, publisher.publish(setting.weights, step=step).path)


def peak(act: Callable[[], object]) -> int:
    """Bytes."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    act()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
