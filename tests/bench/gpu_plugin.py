"""The plugin in a real SGLang on a GPU: how long an update pauses it, beside a stock reload in the same run.

    python tests/bench/gpu_plugin.py --models DIR --url URL --server-pid PID --root DIR [--out FILE] [--updates 100]

The server was started on DIR/a (Qwen2.5-1.5B's shapes) with the plugin in its environment and REFITD_SGLANG_ROOT=root,
the root on tmpfs; DIR/b is another model of that shape. This process is the trainer: it has the weights on the GPU,
publishes versions, and is the service to the engine: prepare over the channel, pause, update, go on.

Paused is the time of `/update_weights_from_disk` itself, as its caller sees it; pause and continue are given beside it.
"""

import argparse
import json
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from in_flight import in_flight, told
from made_delta import RUN, Weights, write_delta
from memory_used import DEVICE, Memory, gpu_free, host_memory, pinned_copy, scheduler_of
from plugged_engine import Engine
from timed import spread, timed

from refitd_client import PublishOptions, WeightPublisher
from refitd_client.contract.naming import Order, version_folder
from refitd_client.fingerprint import fingerprints

ROUNDS = 10
STREAMS, TOKENS = 8, 600  # requests in flight; a server without CUDA graphs takes some 10 s for them


class Bench:
    """All of it, in one run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.root: Path = options.root
        self.engine = Engine(options.url, self.root)
        self.out: dict[str, Any] = {"device": DEVICE, "torch": torch.__version__}
        self.weights: Weights = load_file(options.models / "b" / "model.safetensors", device=DEVICE)
        self.memory = Memory()
        self.step = 0
        self.turn = 1  # of the two full versions

    def run(self) -> None:
        """Step by step, each in the result when it is done."""
        for part in (self.bus, self.stock, self.publish, self.full, self.deltas, self.same, self.pauses, self.many):
            began = time.perf_counter()
            try:
                part()
            except Exception as error:
                self.out[f"{part.__name__} FAILED"] = f"{type(error).__name__}: {error}"[:2000]
                with suppress(Exception):
                    self.serve_full()
            print(part.__name__, round(time.perf_counter() - began, 1), "s", flush=True)
            self.options.out.write_text(json.dumps(self.out, indent=1))
        print(json.dumps(self.out, indent=1))

    def bus(self) -> None:
        """The bus."""
        size = sum(tensor.nbytes for tensor in self.weights.values())
        self.out["bytes"] = size
        self.out["pinned copy ms"] = pinned_copy(size)

    def stock(self) -> None:
        """SGLang's own reload: these folders have no manifest."""
        times = [timed(lambda name=name: self.engine.update(self.options.models / name))[0] for name in "bababa"]
        self.out["stock reload ms"] = spread(times[2:])

    def publish(self) -> None:
        """Two full versions, with fingerprints."""
        state_a = load_file(self.options.models / "a" / "model.safetensors", device=DEVICE)
        with WeightPublisher(self.root, RUN, options=PublishOptions(fingerprints=True)) as publisher:
            for state in (state_a, self.weights):
                self.step += 1
                publisher.publish(state, step=self.step)
        del state_a
        self.prints = dict(zip(self.weights, fingerprints(self.weights.values()), strict=True))

    def full(self) -> None:
        """Learn, replay, and replay what was prepared."""
        first = [self.engine.update(self.path(1)), self.engine.update(self.path(2))]
        self.out["first full updates"] = first
        self.out["hello"] = self.engine.ask(do="hello")
        prepared, seen = [], {1: set(), 2: set()}
        with self.memory.watched():
            times, answers, stages = [], [], []
            for number in range(2 * ROUNDS):
                step = number % 2 + 1
                reply = self.engine.prepare(self.path(step), check="headers")
                prepared.append(reply["ms"])
                stages.append(reply["stages"])
                took, answer = timed(lambda step=step: self.engine.update(self.path(step)))
                times.append(took)
                answers.append(answer)
                seen[step].add(answer["contents"])
        self.out["full paused ms"] = spread(times[4:])
        self.out["full paused in the scheduler ms"] = spread([inside(each) for each in answers[4:]])
        self.out["full stages ms"] = answers[-1]
        self.out["full prepare stages ms"] = stages
        self.out["full prepare ms"] = spread(prepared[4:])
        self.out["full extra GPU MiB"] = round(self.memory.highest, 1)
        self.out["full fingerprints agree"] = all(len(each) == 1 for each in seen.values())
        took, answer = timed(lambda: self.engine.update(self.path(1)))
        self.out["full not prepared"] = {"took": round(took, 1), **answer}
        began = time.perf_counter()
        self.out["full prepared with its bytes read"] = self.engine.prepare(self.path(2))
        self.out["full prepared with its bytes read"]["took"] = round((time.perf_counter() - began) * 1000, 1)
        self.engine.update(self.path(2))

    def deltas(self) -> None:
        """A chain of them, 1 % each, and one of 0.1 %."""
        memory, times, prepared, answers = Memory(), [], [], []
        self.step = 2
        for _ in range(ROUNDS):
            folder = self.next_delta(0.01)
            with memory.watched():
                reply = self.engine.prepare(folder)
                prepared.append(reply["ms"])
                took, answer = timed(lambda folder=folder: self.engine.update(folder))
            times.append(took)
            answers.append(answer)
        self.out["delta 1 % paused ms"] = spread(times[2:])
        self.out["delta 1 % paused in the scheduler ms"] = spread([inside(each) for each in answers[2:]])
        self.out["delta 1 % first ms"] = round(times[0], 1)
        self.out["delta 1 % stages ms"] = answers[-1]
        self.out["delta 1 % prepare ms"] = spread(prepared[2:])
        self.out["delta 1 % prepare stages ms"] = reply["stages"]
        self.out["delta extra GPU MiB"] = round(memory.highest, 1)
        folder = self.next_delta(0.01)
        took, answer = timed(lambda: self.engine.update(folder))
        self.out["delta 1 % not prepared"] = {"took": round(took, 1), **answer}
        times = []
        for _ in range(5):
            folder = self.next_delta(0.01)
            self.engine.prepare(folder)
            times.append(timed(lambda folder=folder: self.engine.update(folder, flush=False))[0])
        self.out["delta 1 % paused ms, no flush"] = spread(times[1:])
        times = []
        for _ in range(5):
            folder = self.next_delta(0.001)
            self.engine.prepare(folder)
            times.append(timed(lambda folder=folder: self.engine.update(folder))[0])
        self.out["delta 0.1 % paused ms"] = spread(times[1:])

    def same(self) -> None:
        """A full version of what the deltas led to is the same, bit for bit and answer for answer."""
        contents, answer = self.engine.ask(do="hello")["served"], self.engine.generate()
        folder = self.next_delta(0.0001)
        self.engine.prepare(folder)
        by_delta = self.engine.update(folder)
        spoken = self.engine.generate()
        full = self.serve_full()
        self.out["delta and full agree"] = {
            "served before": contents,
            "contents": by_delta["contents"] == full["contents"],
            "answers": spoken == self.engine.generate(),
            "answer changed by the delta": answer != spoken,
            "how": [by_delta["how"], full["how"]],
        }

    def pauses(self) -> None:
        """Updates between SGLang's own pause and continue, in both modes: idle, and with requests in flight.

        Full versions come last, since the next delta would not fit them.
        """
        for mode in ("retract", "in_place"):
            self.serve_full()
            found = self.out[mode] = {}
            for load in ("nothing", "delta"):
                found[f"{load}, idle ms"] = summed([self.around(mode, load, flush=True)[0] for _ in range(5)])
            laps, windows = {}, []
            with in_flight(self.options.url, STREAMS, TOKENS) as streams:
                for load in ("nothing", "delta", "delta", "full", "full"):
                    lap, window = self.around(mode, load, flush=False)
                    laps.setdefault(load, []).append(lap)
                    windows.append(window)
            for load, each in laps.items():
                found[f"{load}, under load ms"] = summed(each)
            found["in flight"] = told(streams, windows, TOKENS)
            found["full, idle ms"] = summed([self.around(mode, "full", flush=True)[0] for _ in range(5)])

    def around(self, mode: str, load: str, *, flush: bool) -> tuple[dict[str, float], tuple[float, float]]:
        """Pause, update, continue: the milliseconds of each, and from when to when."""
        self.turn = 3 - self.turn
        folder = None if load == "nothing" else self.next_delta(0.01) if load == "delta" else self.path(self.turn)
        if folder is not None:
            self.engine.prepare(folder, check="headers")
        work = {
            "pause": lambda: self.engine.post("/pause_generation", mode=mode),
            "update": lambda: folder is None or self.engine.update(folder, flush=flush),
            "continue": lambda: self.engine.post("/continue_generation", torch_empty_cache=False),
        }
        began = time.perf_counter()
        lap = {name: timed(act)[0] for name, act in work.items()}
        ended = time.perf_counter()
        return lap | {"together": (ended - began) * 1000}, (began, ended)

    def many(self) -> None:
        """Many updates in a row: full, full, delta. Memory after twenty, and at the end."""
        self.engine.update(self.path(2))
        for path in (self.root / RUN).glob("v*"):
            if path.name not in {self.path(1).name, self.path(2).name}:
                shutil.rmtree(path)
        self.weights = load_file(self.options.models / "b" / "model.safetensors", device=DEVICE)
        self.prints = dict(zip(self.weights, fingerprints(self.weights.values()), strict=True))
        self.step = 2
        cycle = [self.path(1), self.path(2), self.next_delta(0.01)]
        process, seen, marks = scheduler_of(self.options.server_pid), {path: set() for path in cycle}, []
        for number in range(self.options.updates):
            path = cycle[number % 3]
            self.engine.prepare(path, check="headers")
            seen[path].add(self.engine.update(path)["contents"])
            if number % 3 == 2 and (number < 30 or number > self.options.updates - 10):
                marks.append({"update": number + 1, "GPU free MiB": round(gpu_free(), 1), **host_memory(process)})
        self.out["many"] = {
            "updates": self.options.updates,
            "fingerprints agree": all(len(each) == 1 for each in seen.values()),
            "memory": marks,
        }

    def serve_full(self) -> dict[str, Any]:
        """The weights as they are now, as a full version."""
        self.step += 1
        with WeightPublisher(self.root, RUN, options=PublishOptions(fingerprints=True)) as publisher:
            publisher.publish(self.weights, step=self.step)
        return self.engine.update(self.path(self.step))

    def next_delta(self, share: float) -> Path:
        """From what is served now."""
        self.step += 1
        return write_delta(self.root, self.step, self.step - 1, self.weights, share, self.prints)

    def path(self, step: int) -> Path:
        """A version's folder."""
        return self.root / RUN / version_folder(Order(1, step))


def inside(answer: dict[str, Any]) -> float:
    """What an update took of the scheduler's loop, by its own stages: those that hold no other."""
    return sum(answer["ms"].get(stage, 0.0) for stage in ("prepare", "agree", "load", "restore"))


def summed(laps: list[dict[str, float]]) -> dict[str, Any]:
    """Each part of them."""
    return {name: spread([lap[name] for lap in laps]) for name in laps[0]}


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--server-pid", type=int, required=True)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("gpu-plugin.json"))
    parser.add_argument("--updates", type=int, default=99)
    options = parser.parse_args()
    Bench(options).run()


if __name__ == "__main__":
    main()
