"""How long a rank takes to prepare what a trainer hands over, beside a loop that never waits.

    PYTHONPATH=client:service:tests python tests/bench/prepare_offer.py [--tensors 338] [--rounds 30]

The first offer is read, opened and held against the model; the next ones say of places what it said. `waits` are how
often the rank's thread gave the interpreter away, or waited for something else (voluntary context switches,
getrusage(2)), `cpu` how long it ran: what a prepare costs beside a busier loop, on a machine with more cores, follows
from these two. `offer` is what the trainer does before it sends the notice, with the fingerprints of small tensors.

No SGLang: one rank with SGLang's own flow (`support.mini_sglang`), and in the place of SGLang's scheduler a thread that
runs Python without ever waiting. Tensors are in shared memory: the twin of a GPU's.
"""

import argparse
import json
import resource
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from refitd_client.checkpoint.finite import rule_of
from refitd_client.contract.plugin import PluginRequest
from refitd_client.transport.memory import LayoutCache
from refitd_client.transport.offer_file import ExportedTensors, make_secret, read_secret
from refitd_plugin.rank_plugin import RequestHandler
from refitd_sglang.process import SglangProcess
from support.exporting import fill, shared
from support.tiny_rank import Rank, Weights, version


class Layers(torch.nn.Module):
    """So many tensors, each copied as it is."""

    rank, size = 0, 1

    def __init__(self, tensors: int) -> None:
        super().__init__()
        for number in range(tensors):
            empty = torch.zeros(8, 8, dtype=torch.bfloat16)
            self.register_parameter(f"t{number}", torch.nn.Parameter(empty, requires_grad=False))

    def load_weights(self, weights: Any) -> None:
        """By name."""
        for name, tensor in weights:
            getattr(self, name).data.copy_(tensor)


def spinning(stop: threading.Event) -> None:
    """What a scheduler with nothing to do does: it asks and asks."""
    while not stop.is_set():
        sum(number for number in range(50))


def weights_of(model: Layers, seed: int) -> Weights:
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(each.shape, generator=random).bfloat16() for name, each in model.named_parameters()}


def spread(times: list[float]) -> dict[str, float]:
    """The middle, and the most."""
    return {"p50": round(statistics.median(times), 2), "max": round(max(times), 2)}


class Bench:
    """A trainer and a rank on one root."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.root, startup = folder / "root", folder / "startup"
        for each in (self.root / ".refitd", self.root / "run", startup):
            each.mkdir(parents=True)
        make_secret(self.root)
        self.model = Layers(options.tensors)
        save_file(weights_of(self.model, 0), startup / "model.safetensors")
        self.rank = Rank(startup, model=self.model)
        for step in (1, 2):
            self.rank.answer(version(self.root, step, weights_of(self.model, step)))
        self.desk = RequestHandler(self.root, SglangProcess(self.rank.updater, object), self.rank.engine, None, "bench")
        self.trainer, self.layouts = shared(weights_of(self.model, 3), folder), LayoutCache()
        self.rules = [rule_of("BF16")] * options.tensors

    def step(self, step: int) -> dict[str, float]:
        """One offer, prepared and not loaded."""
        began = time.perf_counter()
        looked = self.layouts.prepare(self.trainer.tensors, self.rules)
        offer = looked.offer(f"run~v{step:06d}", [each.fingerprint for each in looked.scan()])
        with ExportedTensors(self.root / "run", offer, read_secret(self.root)) as exported:
            offered = time.perf_counter()
            before = resource.getrusage(resource.RUSAGE_THREAD)
            reply = self.desk.handle(
                PluginRequest(do="prepare", path=f"run/v{step:06d}", offer=f"run/{exported.path.name}")
            )
            after = resource.getrusage(resource.RUSAGE_THREAD)
            prepared = time.perf_counter()
        assert reply["ok"], reply
        ran = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {
            "offer": (offered - began) * 1000,
            "prepare": (prepared - offered) * 1000,
            "waits": after.ru_nvcsw - before.ru_nvcsw,
            "cpu": ran * 1000,
        }

    def run(self, rounds: int) -> dict[str, Any]:
        """The first one, and the rest; each beside a loop, then alone."""
        found: dict[str, Any] = {"tensors": len(self.rules)}
        for name in ("beside a loop", "alone"):
            stop = threading.Event()
            loop = threading.Thread(target=spinning, args=(stop,))
            if name == "beside a loop":
                loop.start()
            self.rank.engine.forget()
            self.rank.engine.preparing.handle_cache.close()
            fill(self.trainer, weights_of(self.model, 4))
            every = [self.step(3) for _ in range(1 + rounds)]
            stop.set()
            if loop.is_alive():
                loop.join()
            found[name] = {
                "first": every[0],
                "next": {each: spread([one[each] for one in every[1:]]) for each in every[0]},
            }
        return found


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=338)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        print(json.dumps(Bench(Path(folder), options).run(options.rounds), indent=1))


if __name__ == "__main__":
    main()
