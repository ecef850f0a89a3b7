"""A model of 100,000 small tensors: to publish it, as a delta too, and to check what was published.

Beside safetensors' own `save_file` of the same tensors, in turns, in memory where there is room. What a service does
between the notice and "sealed" is called here: the structure, the bytes and the verdict.
"""

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from figures import Figure, percentile, spread
from publish import MEMORY
from safetensors.torch import save_file

from refitd_client import PublishOptions, WeightPublisher
from refitd_client.checkpoint.inventory import Reference
from refitd_client.validation.examine import examine, structure
from refitd_client.validation.validate import Options, Valid, validate
from support.stand_in_service import StandIn, make_engine, stand_in

TENSORS = 100_000
ROUNDS = 5
RUN = "bench"
ROOM = 4 * 10**9  # bytes that the rounds take at most

Weights = dict[str, torch.Tensor]


def many_tensors(folder: Path) -> list[Figure]:
    """Each way, round by round in turns with `save_file`."""
    has_room = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM
    with tempfile.TemporaryDirectory(prefix="refitd-bench-", dir=MEMORY if has_room else folder) as name:
        return _figures(_measured(Path(name)))


def _measured(folder: Path) -> dict[str, list[float]]:
    chance = torch.Generator().manual_seed(0)
    weights = {
        f"layers.{number // 1000}.experts.{number % 1000}.weight": torch.randn(8, 32, generator=chance).bfloat16()
        for number in range(TENSORS)
    }
    took: dict[str, list[float]] = {"save_file": [], "publish": [], "fingerprints": [], "delta": [], "check": []}
    with (
        stand_in() as service,
        WeightPublisher(folder / "plain", RUN) as plain,
        WeightPublisher(folder / "fingerprints", RUN, options=PublishOptions(fingerprints=True)) as named,
        WeightPublisher(folder / "delta", RUN, service.url) as delta,
    ):
        for step in range(ROUNDS + 2):  # the first lays the tensors out, and the second is the first delta
            samples = {
                "save_file": _timed(lambda: save_file(weights, folder / "by-hand.safetensors")),
                "publish": _timed(lambda step=step: plain.publish(weights, step=step)),
                "fingerprints": _timed(lambda step=step: named.publish(weights, step=step)),
                "delta": _timed(lambda step=step: _delta(service, delta, weights, step)),
                "check": _timed(lambda step=step: _checked(folder / "plain", step)),
            }
            for way, sample in samples.items() if step > 1 else ():
                took[way].append(sample)
            for way in ("plain", "fingerprints"):
                shutil.rmtree(folder / way / RUN / f"v{step:06d}")
            for number, tensor in enumerate(weights.values()):
                if number % 2:
                    tensor.view(-1)[number % 250 : number % 250 + 5] += 1  # 2 % of every other one
    return took


def _delta(service: StandIn, publisher: WeightPublisher, weights: Weights, step: int) -> None:
    publication = publisher.publish(weights, step=step, transport="delta")
    service.engines = [make_engine(version=publication.version_id, step=step, run=RUN)]


def _checked(root: Path, step: int) -> None:
    seen = structure(root, f"{RUN}/v{step:06d}")
    reference = Reference(seen.inventory, tied=False, source="the first version")
    verdict = validate(examine(root, seen.path, reference, Options(), seen=seen), reference, Options())
    assert isinstance(verdict, Valid), verdict


def _timed(act: Callable[[], object]) -> float:
    """Microseconds a tensor."""
    began = time.perf_counter()
    act()
    return (time.perf_counter() - began) / TENSORS * 1e6


def _figures(took: dict[str, list[float]]) -> list[Figure]:
    by_hand = percentile(took["save_file"], 50)
    limits = {
        "publish": ("published", 8.0),
        "fingerprints": ("published with fingerprints", 20.0),
        "delta": ("published as a delta, 1 % changed, in every other tensor", 20.0),
        "check": ("checked before they are sealed", 4.0),
    }
    return [
        Figure(
            name=f"{TENSORS:,} small tensors {what}, for each",
            measured=round(percentile(took[way], 50), 2),
            unit="us",
            limit=limit,
            detail={
                "save_file": spread(took["save_file"]),
                "x save_file": round(percentile(took[way], 50) / by_hand, 3),
            }
            | {way: spread(took[way])},
        )
        for way, (what, limit) in limits.items()
    ]
