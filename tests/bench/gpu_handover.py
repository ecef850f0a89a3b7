"""From `publish()` to answers by new, verified weights: full versions, deltas, and hand-overs from memory, in one run.

    python tests/bench/gpu_handover.py --models DIR --url URL --root DIR [--out FILE] [--rounds 10] [--device 1]
        [--engine vllm] [--stock] [--dtype fp8_block] [--transport nccl gloo] [--room GB] [--pause-mode abort]
        [--only files saved]

A server was started on DIR/a (Qwen2.5-1.5B's shapes) with the plugin in its environment and REFITD_SGLANG_ROOT=root
(REFITD_VLLM_ROOT=root), the root on tmpfs and empty but for `.refitd`. This process is the trainer: it has the weights
on that GPU, or on another, starts the service and publishes. What answers is asked of the engine itself. A server
without the plugin (`--stock`) is updated by files. A vLLM first loads
DIR/b and DIR/a in turns by its own routes.
With `--room` so much of the engine's GPU is left free: where that is less than the weights, receivers keep what they
receive in pinned memory of the host. Only files, and what is sent without files, are measured then.
With `--dtype fp8_block` DIR/a is an fp8 checkpoint, and the trainer's bf16 weights of DIR/b go out in fp8, as files.

After the publications by files, the same trainer saves its weights with `save_pretrained`, without refitd's SDK, and
says so by POST. These folders have no `refit.json`. The last of them is published by the SDK as well: the engine has to
hold and answer the same. `--only files saved` measures these two alone.

    answered     from the call of publish() until the service says that the version is served: every engine has proved
                 that it holds it, and generates again. Another process waits for that, and takes the time
    held         until publish() returns: the tensors may change
    sealed       until the version's files are found good
    paused       of it, how long the engine generated nothing: from the pause until it was resumed
    notice to …  from the POST, or when the service knew of the publication, until the version was served, and until the
                 engine's next answer

Between two publications the trainer computes for `--between` seconds: the engine opens the files that followed the
last one meanwhile. The stages are those that publisher, service and engine report of themselves.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent))

from dialects import DIALECTS, vllm_reload
from in_flight import in_flight, told
from memory_used import DEVICE, Memory
from stack import refitd

from refitd_client import Notice, PublishOptions, RefitClient, WeightPublisher
from refitd_client.fingerprint.device import flat_bits
from refitd_client.publish.options import DeltaRules

RUN = "handover"
PATIENCE = 120.0
STREAMS, TOKENS = (8, 64), 300  # requests in flight, and what each generates
PAUSED = ("pause", "load", "verify", "resume")
MEASURED = ("answered", "held", "sealed", "paused", "notice to served", "notice to an answer")
Weights = dict[str, Any]


def spread(times: list[float]) -> dict[str, Any]:
    """Milliseconds, all of them and their middle."""
    return {
        "p50": round(statistics.median(times), 1),
        "min": round(min(times), 1),
        "max": round(max(times), 1),
        "all": [round(each, 1) for each in times],
    }


def medians(samples: list[dict[str, float]]) -> dict[str, float]:
    """Of each stage that any of them has."""
    names = {name: None for sample in samples for name in sample}
    return {name: round(statistics.median(each[name] for each in samples if name in each), 1) for name in names}


def table(out: dict[str, Any]) -> str:
    """The medians with the fastest and the slowest, a line for each way; and how long a saved folder pauses."""
    ways = [key.removesuffix(": paused ms") for key in out if key.endswith(": paused ms")]
    lines = [f"{'ms':<10}" + "".join(f"{what:>28}" for what in MEASURED)]
    for way in ways:
        found = [out.get(f"{way}: {what} ms") for what in MEASURED]
        cells = ["" if each is None else f"{each['p50']:g} [{each['min']:g}, {each['max']:g}]" for each in found]
        lines.append(f"{way:<10}" + "".join(f"{cell:>28}" for cell in cells))
    more = [key for key in out if key.endswith(("FAILED", "of that of files", "are the same"))]
    return "\n".join(lines + [f"{key}: {out[key]}" for key in more])


def step_on(weights: Weights, share: float = 0.01) -> None:
    """A trainer's step, in place: about so many of all elements move by one unit in the last place."""
    for tensor in weights.values():
        bits = flat_bits(tensor)
        at = torch.randint(0, bits.numel(), (max(1, round(bits.numel() * share)),), device=bits.device)
        bits[at] ^= 1
    if torch.cuda.is_available():
        torch.cuda.synchronize()


WATCH = """
import sys, time
from refitd_client import RefitClient
from refitd_client.errors import NotFoundError
with RefitClient(sys.argv[1]) as client:
    for line in sys.stdin:
        version, outcome = line.strip(), "pending"
        while outcome == "pending":
            try:
                outcome = client.wait(version, "served", 60).outcome
            except NotFoundError:
                time.sleep(0.015)  # nobody is faster; who asks more often takes the service's time
        print(version, time.monotonic() if outcome == "served" else "nan", flush=True)
"""


class Watcher:
    """A process that waits for a version to be served: this one's interpreter is the trainer's alone."""

    def __init__(self, url: str) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([sys.executable, "-c", WATCH, url], **pipes)

    def begin(self, version: str) -> None:
        """Wait for this one from now on."""
        self._version = version
        self._process.stdin.write(f"{version}\n")  # type: ignore[union-attr]
        self._process.stdin.flush()  # type: ignore[union-attr]
        time.sleep(0.2)  # it asks already

    def end(self) -> float:
        """When it was served, by the monotonic clock; NaN if it never was. An earlier one may have been given up."""
        lines = (line.split() for line in self._process.stdout)  # type: ignore[union-attr]
        return next(float(at) for version, at in lines if version == self._version)

    def close(self) -> None:
        """End it."""
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait(10)


class Bench:
    """All of it, in one run."""

    def __init__(self, options: argparse.Namespace, url: str) -> None:
        self.options, self.service, self.dialect = options, url, DIALECTS[options.engine]
        self.out: dict[str, Any] = {"device": DEVICE, "torch": torch.__version__, "trainer's GPU": options.device}
        device = f"cuda:{options.device}" if DEVICE == "cuda" else DEVICE
        self.weights: Weights = load_file(options.models / "b" / "model.safetensors", device=device)
        self.step = 0
        self.watcher = Watcher(url)
        self.engine = httpx.Client(base_url=options.url, trust_env=False, timeout=PATIENCE)

    def run(self) -> None:
        """By files, as deltas, from memory, and by files again, each in the result when it is done."""
        self.out["bytes"] = sum(tensor.nbytes for tensor in self.weights.values())
        alone = tuple(partial(self.alone, name) for name in self.options.transport)
        memory = () if self.options.dtype or self.options.stock else (self.memory,)
        sent = tuple(partial(self.sent, name) for name in self.options.transport)
        by_plugin = () if self.options.stock else (self.deltas, *memory, *sent, self.same)
        saved = () if self.options.dtype else (self.saved,)
        with RefitClient(self.service) as self.client:
            is_crowded = self.options.room is not None
            more = () if is_crowded else (*saved, *by_plugin, self.under_load, self.last)
            parts = (self.files, *more)
            self.carry_out("always", tuple(part for part in parts if self.is_wanted(part)))
            if memory and not self.options.only:
                self.carry_out("never", alone if is_crowded else (self.alone, *alone))
            self.out["engine"] = str(self.client.engines().items[0])[:600]
            self.options.out.write_text(json.dumps(self.out, indent=1))
        self.watcher.close()
        print(json.dumps(self.out, indent=1))
        print(table(self.out))

    def is_wanted(self, part: Callable[[], None]) -> bool:
        """Whether a part is to be carried out."""
        return not self.options.only or getattr(part, "__name__", "") in self.options.only

    def carry_out(self, durable: str, parts: tuple[Callable[[], None], ...]) -> None:
        """Some parts, by one publisher. One that fails is in the result, and the next ones go on."""
        options = PublishOptions(
            base_model=self.options.models / "a",
            fingerprints=True,
            shadow="gpu",
            delta_rules=DeltaRules(anchor_every=1000),
            dtype=self.options.dtype,
            durable=durable,
        )
        with WeightPublisher(self.options.root, RUN, self.service, options=options) as self.publisher:
            for part in parts:
                try:
                    part()
                except Exception as error:
                    self.out[f"{getattr(part, '__name__', part)} FAILED"] = f"{type(error).__name__}: {error}"[:3000]
                self.options.out.write_text(json.dumps(self.out, indent=1))

    def files(self) -> None:
        """By its files, staged."""
        self.rounds("files", warm=5, block="staged")

    def saved(self) -> None:
        """The same, as checkpoints of `save_pretrained` without a manifest; beside the publications in this run."""
        self.module = AutoModelForCausalLM.from_pretrained(self.options.models / "b", dtype="auto")
        self.module.load_state_dict(self.weights, strict=False, assign=True)
        self.module.tie_weights()
        self.rounds("saved", publish=self.save, warm=2)
        before, contents = self.generate(), None if self.options.stock else self.ask(do="contents")
        self.one(block="staged")
        same = {"answers": before == self.generate()}
        if contents is not None:
            same["contents"] = contents == self.ask(do="contents")
        self.out["saved and published are the same"] = same
        if "files: paused ms" in self.out:
            self.out["saved: paused, of that of files"] = round(
                self.out["saved: paused ms"]["p50"] / self.out["files: paused ms"]["p50"], 3
            )

    def deltas(self) -> None:
        """The same, as what has changed since the version that is served; the first is a full one, to begin from."""
        self.one(block="staged", transport="delta")
        self.rounds("delta", warm=3, block="staged", transport="delta")

    def memory(self) -> None:
        """From memory; its files follow."""
        self.rounds("memory", warm=3, transport="handover")

    def sent(self, transport: str) -> None:
        """Over a process group; its files follow."""
        self.rounds(transport, warm=3, transport=transport)

    def alone(self, transport: str = "handover") -> None:
        """From memory or over a process group, and no files follow."""
        self.rounds(f"{transport} alone", warm=3, transport=transport)

    def rounds(self, name: str, *, warm: int, publish: Callable[..., dict[str, Any]] | None = None, **how: Any) -> None:
        """So many publications, and the first ones apart from the others."""
        extra, found = Memory(), []
        for number in range(warm + self.options.rounds):
            time.sleep(self.options.between)
            step_on(self.weights)
            with extra.watched() if number >= warm else nullcontext():
                found.append((publish or self.one)(**how))
        for what in [what for what in MEASURED if what in found[0]]:
            self.out[f"{name}: {what} ms"] = spread([each[what] for each in found[warm:]])
        self.out[f"{name}: stages ms"] = medians([each["stages"] for each in found[warm:]])
        self.out[f"{name}: prepare ms"] = [each["stages"].get("prepare") for each in found]
        self.out[f"{name}: steps"] = list(range(self.step - self.options.rounds + 1, self.step + 1))
        self.out[f"{name}: kinds"] = sorted({each["kind"] for each in found})
        self.out[f"{name}: handed"] = (
            [each["handed"] for each in found] if {"handover", "transport"} & how.keys() else []
        )
        self.out[f"{name}: extra GPU MiB"] = round(extra.highest, 1)
        self.out[f"{name}: left out: answered, paused ms"] = [
            [round(each[what], 1) for what in ("answered", "paused")] for each in found[:warm]
        ]

    def one(self, **how: Any) -> dict[str, Any]:
        """One publication: milliseconds until it was answered, held and sealed, its stages, and what it was."""
        step = self.next()
        self.watcher.begin(f"{RUN}~v{step:06d}")
        began = time.monotonic()
        publication = self.publisher.publish(self.weights, step=step, **how)
        held = time.monotonic()
        if not publication.committed().in_memory:
            publication.wait(PATIENCE, "sealed")
        sealed = time.monotonic()
        served, handed = self.served(publication.version_id, began), publication.handed
        return served | {
            "held": (held - began) * 1000, "sealed": (sealed - began) * 1000,
            "stages": publication.committed().timings | served["stages"], "kind": publication.committed().kind.value,
            "handed": handed and {
                "engines": handed.engines, "reason": handed.reason, "ms": dict(handed.timings or {}),
                "sent": dict(handed.sent or {}),
            },
        }  # fmt: skip

    def save(self) -> dict[str, Any]:
        """One checkpoint as a trainer without the SDK saves it, and its notice, from which on time is taken."""
        step = self.next()
        folder = self.options.root / RUN / f"v{step:06d}"
        began = time.monotonic()
        self.module.save_pretrained(folder, max_shard_size="50GB")
        self.watcher.begin(f"{RUN}~{folder.name}")
        noticed = time.monotonic()
        version = self.client.announce(Notice(run=RUN, step=step, path=str(folder)))
        return self.served(version.id, noticed, noticed) | {"held": (noticed - began) * 1000, "kind": "saved"}

    def served(self, version_id: str, began: float, noticed: float | None = None) -> dict[str, Any]:
        """What became of a version that the watcher waits for: times from `began` on, and from its notice on."""
        answered = self.watcher.end()
        self.generate(1)
        answer = time.monotonic()
        version = self.client.version(version_id)
        last = self.client.engines().items[0].last_attempt
        attempt = {} if last is None else last.timings
        noticed = noticed or datetime.fromisoformat(version.created_at).timestamp() + time.monotonic() - time.time()
        return {
            "began": began, "answered": (answered - began) * 1000,
            "notice to served": (answered - noticed) * 1000, "notice to an answer": (answer - noticed) * 1000,
            "paused": sum(attempt.get(stage, 0.0) for stage in PAUSED), "stages": version.timings | attempt,
        }  # fmt: skip

    def same(self) -> None:
        """What was handed over and its files are the same, bit for bit: equal weights come by files."""
        before, contents = self.generate(), self.ask(do="contents")
        self.publisher.publish(self.weights, step=self.next()).wait(PATIENCE)
        self.out["same"] = {"answers": before == self.generate(), "contents": contents == self.ask(do="contents")}

    def under_load(self) -> None:
        """Requests in flight through each way, several times. The service pauses SGLang before 0.5.21 by `abort`: it
        ends them.
        """
        memory = {} if self.options.stock or self.options.dtype else {"memory": {"transport": "handover"}}
        delta = {} if self.options.stock or self.options.dtype else {"delta": {"block": "staged", "transport": "delta"}}
        sent: Weights = {name: {"transport": name} for name in self.options.transport}
        for name, how in {"files": {"block": "staged"}, **delta, **memory, **sent}.items():
            for _ in range(3):  # the first by another transport begins processes and a group
                step_on(self.weights)
                self.one(**how)
            for count in STREAMS:
                self.out[f"under load: {name}, {count} streams"] = self.through(count, how)
        for count in STREAMS if self.options.engine == "sglang" else ():
            self.out[f"under load: a pause alone, {count} streams: beyond the pause ms"] = self.pause_alone(count)

    def through(self, count: int, how: dict[str, Any]) -> dict[str, Any]:
        """One way, with so many requests in flight. The first of a server, which may compile for them, is left out."""
        found: list[dict[str, Any]] = []
        for _ in range(1 + self.options.rounds):
            time.sleep(self.options.between)
            step_on(self.weights)
            with in_flight(self.options.url, count, TOKENS, self.dialect) as streams:
                one = self.one(**how)
            window = (one["began"], one["began"] + one["answered"] / 1000)
            found.append(one | told(streams, [window], TOKENS))
        kept = found[1:]
        stalls = [each["longest stall ms"][0] for each in kept]
        return {
            "answered ms": spread([each["answered"] for each in kept]),
            "paused ms": spread([each["paused"] for each in kept]),
            "longest stall ms": spread(stalls),
            "beyond the pause ms": spread([stall - each["paused"] for stall, each in zip(stalls, kept, strict=True)]),
            "lost": sum(each["lost"] for each in found),
            "in flight after the update": sum(each["in flight after the last update"] for each in found),
            "kinds": sorted({each["kind"] for each in kept}),
        }

    def pause_alone(self, count: int) -> dict[str, Any]:
        """SGLang's own pause, flush and resume with so many requests in flight, and no load between."""
        found: list[float] = []
        for _ in range(1 + self.options.rounds):
            with in_flight(self.options.url, count, TOKENS, self.dialect) as streams:
                began = time.perf_counter()
                self.engine.post("/pause_generation", json={"mode": "retract"}).raise_for_status()
                self.engine.post("/flush_cache")
                self.engine.post("/continue_generation", json={}).raise_for_status()
                window = (began, time.perf_counter())
            found += told(streams, [window], TOKENS)["beyond the pause ms"]
        return spread(found[1:])

    def last(self) -> None:
        """A full version, and what the engine then answers and holds: to be compared with a server started on it."""
        step_on(self.weights)
        done = self.publisher.publish(self.weights, step=self.next())
        done.wait(PATIENCE)
        contents = None if self.options.stock else self.ask(do="contents")
        self.out["version bytes"] = sum(file.stat().st_size for file in done.path.glob("*.safetensors"))
        self.out["last"] = {"path": str(done.path), "answers": self.generate(), "contents": contents}

    def generate(self, tokens: int = 16, text: str = "hello world") -> list[int]:
        """Greedily."""
        reply = self.engine.post(self.dialect.route, json=self.dialect.body(text, tokens))
        return self.dialect.ids(reply.raise_for_status().json())

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


def own_reloads(options: argparse.Namespace) -> dict[str, Any]:
    """What vLLM's own reload takes, before a service is there. The last one is of what the server was started on."""
    with httpx.Client(base_url=options.url, trust_env=False, timeout=PATIENCE) as http:
        models = [options.models / name for name in "ba"]
        found = [vllm_reload(http, models[number % 2]) for number in range(2 + options.rounds + options.rounds % 2)][2:]
    paused = [each.pop("paused") for each in found]
    return {"own reload: paused ms": spread(paused), "own reload: stages ms": medians(found)}


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("gpu-handover.json"))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--between", type=float, default=1.0, help="seconds between two publications")
    parser.add_argument("--device", type=int, default=0, help="the trainer's GPU; the engine has the first one")
    parser.add_argument("--engine", choices=DIALECTS, default="sglang")
    parser.add_argument("--dtype", choices=["fp8_block"], help="what the trainer's weights are published as")
    parser.add_argument("--transport", nargs="*", default=[], choices=["nccl", "gloo"], help="also over process groups")
    parser.add_argument("--only", nargs="*", default=[], metavar="PART", help="of files, saved, deltas, memory, …")
    parser.add_argument("--stock", action="store_true", help="the server has no plugin")
    parser.add_argument("--room", type=float, metavar="GB", help="leave so much of the engine's GPU free")
    parser.add_argument("--pause-mode", default="auto", help="the service's setting")
    options = parser.parse_args()
    folder = options.out.absolute().parent
    more = ("--base-model", str(options.models / "a"), "--keep-last", "1", "--pause-mode", options.pause_mode)
    ballast = None
    if options.room is not None:
        taken = torch.cuda.mem_get_info(0)[0] - int(options.room * 1e9)
        ballast = torch.empty(max(0, taken), dtype=torch.uint8, device="cuda:0")
    own = own_reloads(options) if options.engine == "vllm" else {}
    with refitd(options.root, folder, [options.url], *more) as (_, url):
        bench = Bench(options, url)
        bench.out |= own | ({} if ballast is None else {"taken of the engine's GPU": ballast.nbytes})
        bench.run()


if __name__ == "__main__":
    main()
