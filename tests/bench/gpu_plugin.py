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
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from refitd_client import WeightPublisher
from refitd_client.contract.manifest import DeltaFacts
from refitd_client.contract.naming import DELTA_NAME, Order, version_folder, version_id
from refitd_client.contract.states import Kind
from refitd_client.delta import Change, Delta, encode, index_type
from refitd_client.fingerprint import fingerprints, to_text
from refitd_client.fingerprint.twin import flat_bits
from refitd_sglang.answer import answers_in
from support.forged import sign

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # without a GPU it shows that it runs, and no figures
RUN = "bench"
ROUNDS = 10
Weights = dict[str, Any]


def spread(times: list[float]) -> dict[str, float]:
    """Milliseconds."""
    ordered = sorted(times)
    return {
        "n": len(ordered),
        "p50": round(statistics.median(ordered), 2),
        "min": round(ordered[0], 2),
        "max": round(ordered[-1], 2),
    }


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds, and what it gave."""
    began = time.perf_counter()
    found = work()
    return (time.perf_counter() - began) * 1000, found


class Engine:
    """The server, over HTTP and the channel."""

    def __init__(self, url: str, root: Path) -> None:
        self._http = httpx.Client(base_url=url, trust_env=False, timeout=120)
        self._root = root

    def post(self, route: str, **body: Any) -> Any:
        """One call."""
        return self._http.post(route, json=body)

    def update(self, path: Path, *, flush: bool = True) -> dict[str, Any]:
        """One update: what the plugin answers; a stock reload says nothing.

        SGLang before 0.5.21 dies of a flush while requests wait.
        """
        order = {"model_path": str(path), "load_format": "auto", "flush_cache": flush}
        reply = self.post("/update_weights_from_disk", **order).json()
        assert reply["success"], reply
        answers = answers_in(reply["message"])
        return {} if not answers else {name: getattr(answers[0], name) for name in ("how", "contents", "proved", "ms")}

    def ask(self, **request: Any) -> dict[str, Any]:
        """One request over the channel of every rank at once: the answer of one that refused, or of the slowest."""
        paths = sorted((self._root / ".refitd" / "engines").glob("*.sock"))
        with ThreadPoolExecutor(len(paths)) as pool:
            replies = [reply for reply in pool.map(lambda path: ask(path, request), paths) if reply is not None]
        return max(replies, key=lambda reply: (not reply["ok"], reply.get("ms", 0.0)))

    def prepare(self, path: Path, check: str = "bytes") -> dict[str, Any]:
        """As the service does while the engine serves."""
        reply = self.ask(do="prepare", path=str(path.relative_to(self._root)), check=check)
        assert reply["ok"], reply
        return reply

    def generate(self, tokens: int = 16, text: str = "hello world") -> list[int]:
        """Greedily."""
        params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return self.post("/generate", text=text, sampling_params=params).json()["output_ids"]

    def stall(self, tokens: int, stop: threading.Event) -> float:
        """The longest gap between two tokens of one stream, in milliseconds."""
        params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = {"text": "once upon a time", "sampling_params": params, "stream": True}
        longest, last = 0.0, None
        with httpx.stream("POST", f"{self._http.base_url}/generate", json=body, timeout=120, trust_env=False) as reply:
            for line in reply.iter_lines():
                if not line.startswith("data:"):
                    continue
                now = time.perf_counter()
                longest, last = max(longest, 0.0 if last is None else (now - last) * 1000), now
                if stop.is_set():
                    break
        return longest


def ask(path: Path, request: dict[str, Any]) -> dict[str, Any] | None:
    """One request to one rank; None where nobody listens any more."""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(60)
        try:
            line.connect(str(path))
        except ConnectionRefusedError:
            return None
        line.sendall(json.dumps(request).encode() + b"\n")
        with line.makefile("rb") as reply:
            return json.loads(reply.readline())


def write_delta(root: Path, step: int, base: int, weights: Weights, share: float, prints: dict[str, int]) -> Path:
    """Change a share of all elements, in place and on the GPU, and publish what changed. `prints` follows."""
    changes: dict[str, Change] = {}
    for name, tensor in weights.items():
        bits = flat_bits(tensor)
        at = (torch.rand(bits.numel(), device=bits.device) < share).nonzero().reshape(-1)
        if not at.numel():
            continue
        bits[at] = bits[at] ^ 1
        before, prints[name] = prints[name], fingerprints([tensor])[0]
        changes[name] = Change(
            dtype={torch.bfloat16: "BF16", torch.float32: "F32"}[tensor.dtype],
            shape=tuple(tensor.shape),
            indices=at.cpu().numpy().astype(index_type(bits.numel())),
            values=bits[at].cpu().numpy().view(f"u{bits.element_size()}"),
            base=before,
            result=prints[name],
        )
    folder = root / RUN / version_folder(Order(1, step))
    folder.mkdir(parents=True)
    made = Delta(base=version_id(RUN, Order(1, base)), version=version_id(RUN, Order(1, step)), changes=changes)
    (folder / DELTA_NAME).write_bytes(encode(made).to_bytes())
    facts = DeltaFacts(
        file=DELTA_NAME,
        encoding="flat",
        compression="none",
        tensors=len(changes),
        changed=made.changed,
        elements=sum(tensor.numel() for tensor in weights.values()),
    )
    texts = {name: to_text(number) for name, number in prints.items()}
    sign(folder, RUN, step, fingerprints=texts, kind=Kind.DELTA, base=made.base, delta=facts)
    return folder


def pinned_copy(nbytes: int) -> dict[str, float]:
    """Host to device, of memory that is pinned: the bus."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=DEVICE == "cuda")
    device = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)

    def copy() -> None:
        device.copy_(host, non_blocking=True)
        torch.zeros(1, device=DEVICE).item()

    return spread([timed(copy)[0] for _ in range(7)][2:])


def gpu_free(*, empty: bool = True) -> float:
    """MiB that nobody has taken, once this process has let go of what it does not use."""
    if DEVICE == "cpu":
        return 0.0
    if empty:
        torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] / 2**20


class Memory:
    """How much of the GPU is used beside what was used at first, at its highest, as seen from this process."""

    def __init__(self) -> None:
        self.highest = 0.0

    @contextmanager
    def watched(self) -> Iterator[None]:
        free, stop = gpu_free(), threading.Event()

        def watch() -> None:
            while not stop.wait(0.002):
                self.highest = max(self.highest, free - gpu_free(empty=False))

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def scheduler_of(pid: int) -> psutil.Process:
    """The process that holds the weights."""
    for child in psutil.Process(pid).children(recursive=True):
        if "scheduler" in " ".join([*child.cmdline(), child.name()]):
            return child
    raise RuntimeError(f"the server {pid} has no scheduler")


def host_memory(process: psutil.Process) -> dict[str, float]:
    """Anonymous memory in MiB, descriptors and mappings."""
    text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    anonymous = next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Anonymous:"))
    maps = len(Path(f"/proc/{process.pid}/maps").read_text().splitlines())
    return {"anonymous MiB": round(anonymous / 1024, 1), "descriptors": process.num_fds(), "mappings": maps}


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
        with WeightPublisher(self.root, RUN, fingerprints=True) as publisher:
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
        """SGLang's own pause and continue around an update, idle and under load, and what a stream of tokens sees."""
        self.out["idle ms"] = self.around(ROUNDS, flush=True)
        stop, wanted = threading.Event(), 400
        with ThreadPoolExecutor(9) as pool:
            running = [pool.submit(self.engine.generate, wanted, f"story {n}") for n in range(8)]
            stream = pool.submit(self.engine.stall, wanted, stop)
            time.sleep(1.0)
            self.out["under load ms"] = self.around(3, flush=False)
            self.out["requests lost under load"] = sum(len(each.result()) != wanted for each in running)
            self.out["longest gap in a stream ms"] = round(stream.result(), 1)

    def around(self, rounds: int, *, flush: bool) -> dict[str, Any]:
        """Pause, update, continue, with deltas."""
        found: dict[str, list[float]] = {"pause": [], "update": [], "continue": [], "together": []}
        for _ in range(rounds):
            folder = self.next_delta(0.01)
            self.engine.prepare(folder)
            steps = {
                "pause": lambda: self.engine.post("/pause_generation", mode="retract"),
                "update": lambda folder=folder: self.engine.update(folder, flush=flush),
                "continue": lambda: self.engine.post("/continue_generation", torch_empty_cache=False),
            }
            began = time.perf_counter()
            for name, work in steps.items():
                found[name].append(timed(work)[0])
            found["together"].append((time.perf_counter() - began) * 1000)
        return {name: spread(times) for name, times in found.items()}

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
        with WeightPublisher(self.root, RUN, fingerprints=True) as publisher:
            publisher.publish(self.weights, step=self.step)
        return self.engine.update(self.path(self.step))

    def next_delta(self, share: float) -> Path:
        """From what is served now."""
        self.step += 1
        return write_delta(self.root, self.step, self.step - 1, self.weights, share, self.prints)

    def path(self, step: int) -> Path:
        """A version's folder."""
        return self.root / RUN / version_folder(Order(1, step))


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
