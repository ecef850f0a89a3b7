"""How long a rank prepares a version beside a loop that never waits: by its prefetch worker, and in its own thread.

    PYTHONPATH=client:service:tests python tests/bench/prepare.py [--layers 28] [--width 64] [--rounds 20] [--root DIR]

`waits` are how often the rank's thread gave the interpreter away, or waited for something else (voluntary context
switches, getrusage(2)), and `cpu` how long it ran: what a prepare costs beside a busier loop, on a machine with more
cores, follows from these two. On a CPU the copies and changes that a GPU gets by a table are made tensor by tensor,
which is `ready`: `check` is what the prefetch worker does.

No SGLang: one rank with SGLang's own flow (`support.mini_sglang`), and in the place of SGLang's scheduler a thread that
never waits, and looks at a socket ten times in a millisecond. Both ways take turns in one run, so that what else the
machine does meets both alike.
"""

import argparse
import json
import resource
import shutil
import socket
import statistics
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from refitd_plugin.channel import short_turns
from refitd_plugin.port import Stages
from support.tiny_rank import Rank, Weights, delta, version

_PER_LAYER = 12
_BETWEEN_LOOKS = 3000  # numbers to add up, about 0.1 ms


class Layers(torch.nn.Module):
    """As many tensors as a model of so many layers has, each copied as it is."""

    rank, size = 0, 1

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        for number in range(layers * _PER_LAYER):
            empty = torch.zeros(width, width, dtype=torch.bfloat16)
            self.register_parameter(f"t{number}", torch.nn.Parameter(empty, requires_grad=False))

    def load_weights(self, weights: Any) -> None:
        """By name."""
        for name, tensor in weights:
            getattr(self, name).data.copy_(tensor)


def spinning(stop: threading.Event) -> None:
    """What a scheduler with nothing to do does: it looks at its sockets, and does what it does between two looks."""
    mine, its = socket.socketpair()
    with mine, its:
        mine.setblocking(False)
        spun = 0
        while not stop.is_set():
            with suppress(BlockingIOError):
                mine.recv(1)
            for number in range(_BETWEEN_LOOKS):
                spun += number


def weights_of(model: Layers, seed: int) -> Weights:
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(each.shape, generator=random).bfloat16() for name, each in model.named_parameters()}


def changed(weights: Weights) -> Weights:
    """One element in a hundred."""
    after = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in after.values():
        tensor.view(-1).view(torch.int16)[::100] ^= 1
    return after


def spread(times: list[float]) -> dict[str, float]:
    """Milliseconds."""
    ordered = sorted(times)
    return {
        "p50": round(statistics.median(ordered), 1),
        "p99": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 1),
    }


def measured(rank: Rank, paths: list[Path], rounds: int, check: bool) -> dict[str, Any]:
    """Both ways in turns."""
    worker = rank.engine.preparing.inspector.worker
    ask, found = worker.ask, dict[str, list[dict[str, float]]]()
    for number in range(2 * rounds):
        way = ("clerk", "thread")[number % 2]
        worker.ask = ask if way == "clerk" else lambda *_: None
        stages = Stages()
        before = resource.getrusage(resource.RUSAGE_THREAD)
        with short_turns(), stages.during("all"):
            rank.engine.prepare(str(paths[number // 2 % len(paths)]), check_bytes=check, stages=stages)
        after = resource.getrusage(resource.RUSAGE_THREAD)
        ran = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        found.setdefault(way, []).append(
            stages.ms | {"waits": after.ru_nvcsw - before.ru_nvcsw, "cpu": ran * 1000},
        )
        time.sleep(0.01)
    worker.ask = ask
    return {
        way: {stage: spread([each[stage] for each in all_ms]) for stage in ("all", "check", "ready", "waits", "cpu")}
        for way, all_ms in found.items()
    }


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--root", type=Path, default=Path("/dev/shm"))  # noqa: S108 - tmpfs, and a folder of its own in it
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.root))
    try:
        print(json.dumps(run(folder, options), indent=1))
    finally:
        shutil.rmtree(folder)


def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Two full versions and a delta, beside a loop that spins."""
    root, startup = folder / "root", folder / "startup"
    for each in (root / ".refitd", startup):
        each.mkdir(parents=True)
    model = Layers(options.layers, options.width)
    save_file(weights_of(model, 0), startup / "model.safetensors")
    rank = Rank(startup, model=model)
    full = [version(root, step, weights_of(model, step), fingerprints=True) for step in (1, 2)]
    for path in full:
        rank.answer(path)
    some = delta(root, 3, 2, weights_of(model, 2), changed(weights_of(model, 2)))
    rank.engine.preparing.inspector.worker.begin()
    rank.engine.prepare(str(full[0]))  # the worker is up when it has answered
    stop = threading.Event()
    loop = threading.Thread(target=spinning, args=(stop,))
    loop.start()
    try:
        return {
            "tensors": options.layers * _PER_LAYER,
            "full, headers": measured(rank, full, options.rounds, check=False),
            "full, bytes": measured(rank, full, options.rounds, check=True),
            "delta": measured(rank, [some], options.rounds, check=True),
        }
    finally:
        stop.set()
        loop.join()


if __name__ == "__main__":
    main()
