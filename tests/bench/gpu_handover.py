"""The hand-over on a GPU: from `publish()` to answers by new, verified weights, beside files in the same run.

    python tests/bench/gpu_handover.py --models DIR --url URL --root DIR [--out FILE] [--rounds 10]

A server was started on DIR/a (Qwen2.5-1.5B's shapes) with the plugin in its environment and REFITD_SGLANG_ROOT=root,
the root on tmpfs and empty but for `.refitd`. This process is the trainer: it has the weights on that GPU, starts the
service and publishes. What answers is asked of the engine itself.

    answered     from the call of publish() until the service says that the version is served: every engine has proved
                 that it holds it, and generates again. Another process waits for that, and takes the time
    held         until publish() returns: the tensors may change
    sealed       until the version's files are found good

Between two hand-overs the trainer computes for `--between` seconds: the engine opens the files that followed the last
one meanwhile.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parent))

from stack import refitd

from refitd_client import RefitClient, WeightPublisher
from refitd_client.fingerprint.twin import flat_bits

RUN = "bench"
PATIENCE = 120.0
Weights = dict[str, Any]


def spread(times: list[float]) -> dict[str, Any]:
    """Milliseconds, all of them and their middle."""
    return {
        "p50": round(statistics.median(times), 1),
        "min": round(min(times), 1),
        "max": round(max(times), 1),
        "all": [round(each, 1) for each in times],
    }


def step_on(weights: Weights) -> None:
    """A trainer's step, in place: some bits of each tensor change."""
    for tensor in weights.values():
        flat_bits(tensor)[:1000] ^= 1
    torch.cuda.synchronize()


class Memory:
    """The most of the GPU's memory that was used beside what was at first, as seen from this process."""

    def __init__(self) -> None:
        self.highest = 0.0

    @contextmanager
    def watched(self) -> Iterator[None]:
        torch.cuda.empty_cache()
        free, stop = torch.cuda.mem_get_info()[0], threading.Event()

        def watch() -> None:
            while not stop.wait(0.002):
                self.highest = max(self.highest, (free - torch.cuda.mem_get_info()[0]) / 2**20)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


WATCH = """
import sys, time
from refitd_client import RefitClient
from refitd_client.errors import NotFoundError
with RefitClient(sys.argv[1]) as client:
    for line in sys.stdin:
        while True:
            try:
                if client.wait(line.strip(), "served", 60).outcome == "served":
                    break
            except NotFoundError:
                time.sleep(0.003)
        print(time.monotonic(), flush=True)
"""


class Watcher:
    """A process that waits for a version to be served: this one's interpreter is the trainer's alone."""

    def __init__(self, url: str) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([sys.executable, "-c", WATCH, url], **pipes)

    def begin(self, version: str) -> None:
        """Wait for this one from now on."""
        self._process.stdin.write(f"{version}\n")  # type: ignore[union-attr]
        self._process.stdin.flush()  # type: ignore[union-attr]
        time.sleep(0.2)  # it asks already

    def end(self) -> float:
        """When it was served, by the monotonic clock."""
        return float(self._process.stdout.readline())  # type: ignore[union-attr]

    def close(self) -> None:
        """End it."""
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait(10)


class Bench:
    """All of it, in one run."""

    def __init__(self, options: argparse.Namespace, url: str) -> None:
        self.options, self.service = options, url
        self.out: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        self.weights: Weights = load_file(options.models / "b" / "model.safetensors", device="cuda")
        self.step = 0
        self.watcher = Watcher(url)
        self.engine = httpx.Client(base_url=options.url, trust_env=False, timeout=PATIENCE)

    def run(self) -> None:
        """By files, from memory, and by files again, each in the result when it is done."""
        with (
            RefitClient(self.service) as self.client,
            WeightPublisher(
                self.options.root, RUN, self.service, base_model=self.options.models / "a", fingerprints=True
            ) as self.publisher,
        ):
            self.out["bytes"] = sum(tensor.nbytes for tensor in self.weights.values())
            for part in (self.files, self.memory, self.same, self.under_load):
                try:
                    part()
                except Exception as error:
                    self.out[f"{part.__name__} FAILED"] = f"{type(error).__name__}: {error}"[:3000]
                self.options.out.write_text(json.dumps(self.out, indent=1))
        self.watcher.close()
        print(json.dumps(self.out, indent=1))

    def files(self) -> None:
        """By its files, staged: what the trainer waits, and until it is served."""
        whole, held = [], []
        for _ in range(4 + self.options.rounds):
            step_on(self.weights)
            began = time.perf_counter()
            publication = self.publisher.publish(self.weights, step=self.next(), block="staged")
            held.append((time.perf_counter() - began) * 1000)
            publication.wait(PATIENCE)
            whole.append((time.perf_counter() - began) * 1000)
        self.out["files: served ms"] = spread(whole[4:])
        self.out["files: held ms"] = spread(held[4:])
        self.out["files: last attempt ms"] = self.attempt()
        self.out["engine"] = str(self.client.engines().items[0])[:600]

    def memory(self) -> None:
        """From memory: until engines have answered, until publish returns, until the files are sealed."""
        answered, held, sealed, stages, handed = [], [], [], [], []
        extra = Memory()
        for number in range(3 + self.options.rounds):
            time.sleep(self.options.between)
            step_on(self.weights)
            with extra.watched():
                times = self.one(handed)
            if number >= 3:
                for some, each in zip((answered, held, sealed), times, strict=True):
                    some.append(each)
            stages.append(self.attempt())
        self.out["memory: answered ms"] = spread(answered)
        self.out["memory: held ms"] = spread(held)
        self.out["memory: sealed ms"] = spread(sealed)
        self.out["memory: attempts ms"] = stages
        self.out["memory: handed"] = handed
        self.out["memory: extra GPU MiB"] = round(extra.highest, 1)

    def one(self, handed: list[Any]) -> tuple[float, float, float]:
        """One hand-over, in milliseconds: answered, held, sealed."""
        step = self.next()
        self.watcher.begin(f"{RUN}~v{step:06d}")
        began = time.monotonic()
        publication = self.publisher.publish(self.weights, step=step, handover=True)
        held = (time.monotonic() - began) * 1000
        told = publication.handed
        handed.append({"engines": told.engines, "reason": told.reason, "ms": dict(told.timings or {})})
        publication.wait(PATIENCE, "sealed")
        sealed = (time.monotonic() - began) * 1000
        return (self.watcher.end() - began) * 1000, held, sealed

    def same(self) -> None:
        """What was handed over and its files are the same, bit for bit: equal weights come by files."""
        before, contents = self.generate(), self.ask(do="contents")
        self.publisher.publish(self.weights, step=self.next()).wait(PATIENCE)
        self.out["same"] = {"answers": before == self.generate(), "contents": contents == self.ask(do="contents")}

    def under_load(self) -> None:
        """Requests in flight through a hand-over: none is lost."""
        lengths: list[int] = []
        threads = [
            threading.Thread(target=lambda n=n: lengths.append(len(self.generate(300, f"story {n}")))) for n in range(8)
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        handed: list[Any] = []
        step_on(self.weights)
        times = self.one(handed)
        for thread in threads:
            thread.join()
        self.out["under load"] = {"ms": times, "handed": handed, "attempt": self.attempt(), "lengths": lengths}

    def attempt(self) -> Any:
        """The stages of the engine's last load."""
        last = self.client.engines().items[0].last_attempt
        return (
            None
            if last is None
            else {"version": last.version, "outcome": last.outcome, "reason": last.reason}
            | {name: round(value, 1) for name, value in last.timings.items()}
        )

    def generate(self, tokens: int = 16, text: str = "hello world") -> list[int]:
        """Greedily."""
        params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return self.engine.post("/generate", json={"text": text, "sampling_params": params}).json()["output_ids"]

    def ask(self, **request: Any) -> Any:
        """One request over the channel of the plugin."""
        (path,) = (self.options.root / ".refitd" / "engines").glob("*.sock")
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(60)
            line.connect(str(path))
            line.sendall(json.dumps(request).encode() + b"\n")
            with line.makefile("rb") as reply:
                return json.loads(reply.readline())

    def next(self) -> int:
        """The next step."""
        self.step += 1
        return self.step


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("gpu-handover.json"))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--between", type=float, default=1.0, help="seconds between two hand-overs")
    options = parser.parse_args()
    folder = options.out.absolute().parent
    more = ("--base-model", str(options.models / "a"), "--keep-last", "1")
    with refitd(options.root, folder, [options.url], *more) as (_, url):
        Bench(options, url).run()


if __name__ == "__main__":
    main()
