"""What `refitd plan` predicts, beside what NVML shows: a real SGLang and a real AdamW trainer on one GPU.

    python tests/bench/gpu_plan.py [--sizes 0.5b,1.5b,3b] [--port 30000] [--out FILE] [--engine-flags '…']

For each size: a server with random weights starts, 64 requests are sent at once, and a trainer (transformers' Qwen2,
bf16, AdamW, loss in fp32) runs beside it, storing activations and then recomputing them. Where NVML does not tell
processes apart (in containers), a process is what the GPU holds more since it was started. Ends with 1 where a
prediction is off by more than 10 %. It needs SGLang's environment (PYTHONPATH) and no network, and stops nothing but
what it started. What was measured so far is in FILE, whatever becomes of the rest.
"""

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pynvml

from refitd_client import plan
from refitd_plan import Gpu
from refitd_plan.machine import read_gpus

LIMIT = 0.10
GIB = 2**30
FRACTION = 0.1
CONTEXT = 4096
MICRO_BATCH = 4096
REQUESTS, PROMPT, ANSWER = 64, 512, 32
# Shapes of Qwen2 with heads of 128 and two of them for keys and values: SGLang compiles its kernels once for all three.
SIZES: Mapping[str, Mapping[str, int]] = {
    "0.5b": {"hidden_size": 1024, "intermediate_size": 4864, "num_hidden_layers": 20, "num_attention_heads": 8},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "3b": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16},
    # These had no part in any formula: they are what the formulas are held against.
    "0.8b": {"hidden_size": 1280, "intermediate_size": 6912, "num_hidden_layers": 20, "num_attention_heads": 10},
    "2b": {"hidden_size": 1792, "intermediate_size": 9728, "num_hidden_layers": 32, "num_attention_heads": 14},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 20},
}
COMMON: Mapping[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OFFLINE: Mapping[str, str] = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
ENGINE_FLAGS = (
    "--dtype bfloat16 --attention-backend triton --sampling-backend pytorch --grammar-backend none "
    "--disable-cuda-graph --disable-piecewise-cuda-graph --disable-flashinfer-autotune --random-seed 1"
)

TRAINER = """
import gc, sys, torch, transformers
folder, tokens, modes = sys.argv[1], int(sys.argv[2]), sys.argv[3].split(",")
config = transformers.AutoConfig.from_pretrained(folder)
print("imported", flush=True)
sys.stdin.readline()
for mode in modes:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.train()
    if mode == "recompute":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for step in range(3):
        for micro_batch in range(2):
            ids = torch.randint(0, config.vocab_size, (1, tokens), device="cuda")
            logits = model(input_ids=ids, use_cache=False).logits
            torch.nn.functional.cross_entropy(logits.float().view(-1, config.vocab_size), ids.view(-1)).backward()
            del logits
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    print(mode, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), flush=True)
    sys.stdin.readline()
    del model, optimizer, ids
    gc.collect()
    torch.cuda.empty_cache()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One process: GiB predicted and seen. `beside`: what PyTorch says of itself, and the prediction's parts."""

    size: str
    process: str
    predicted: float
    seen: float
    beside: Mapping[str, Any]

    @property
    def off(self) -> float:
        """By how much the prediction is off, as a share of what was seen."""
        return self.predicted / self.seen - 1


class Meter:
    """What the GPU holds, as NVML says, and the most that it held since `mark`."""

    def __init__(self) -> None:
        """Begin to look, 20 times a second."""
        self._nvml: Any = pynvml
        self._nvml.nvmlInit()
        self._handle = self._nvml.nvmlDeviceGetHandleByIndex(0)
        self._peak = self._base = self.used()
        self._ended = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    def used(self) -> float:
        """GiB in use."""
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used) / GIB

    def of(self, pid: int) -> float | None:
        """GiB of a process and its children, None where NVML does not tell them apart."""
        family = {pid, *_children(pid)}
        try:
            rows = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except self._nvml.NVMLError:
            return None
        mine = [row.usedGpuMemory for row in rows if row.pid in family and row.usedGpuMemory]
        return sum(mine) / GIB if mine else None

    def close(self) -> None:
        """Look no more."""
        self._ended.set()

    def mark(self) -> None:
        """Count from here."""
        self._base = self._peak = self.used()

    @property
    def more(self) -> float:
        """The most GiB beyond what was held at the mark."""
        return max(self._peak, self.used()) - self._base

    @property
    def now(self) -> float:
        """The GiB that are held now beyond what was held at the mark."""
        return self.used() - self._base

    def settle(self) -> None:
        """Wait until what others have left is given back: the driver takes its time."""
        before = self.used()
        for _ in range(30):
            time.sleep(0.5)
            if abs(before - (before := self.used())) < 0.01:
                return

    def _look(self) -> None:
        while not self._ended.wait(0.05):
            self._peak = max(self._peak, self.used())


def _children(pid: int) -> set[int]:
    found: set[int] = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            child = int(status.parent.name)
            found |= {child, *_children(child)}
    return found


def _predicted(size: str, gpu: Gpu, *, recompute: bool) -> Mapping[str, Mapping[str, Any]]:
    made = plan(
        engine_gpus=1,
        trainer_gpus=1,
        gpus=[gpu],
        nodes=1,
        plugin=False,
        model={**COMMON, **SIZES[size]},
        loss="eager",
        gradient_checkpointing=recompute,
        micro_batch_tokens=MICRO_BATCH,
        batch_size=REQUESTS,
        samples=1,
        prompt_tokens=PROMPT,
        max_new_tokens=ANSWER,
        concurrent_rollouts=REQUESTS,
        mem_fraction_static=FRACTION,
        context_length=CONTEXT,
    )
    assert made.memory is not None
    # The trainer of this benchmark does not publish.
    return {
        process.role: {
            "total": process.total - process.parts.get("publish staging", 0.0),
            "parts": process.parts,
        }
        for process in made.memory.processes
    }


@contextmanager
def _started(command: list[str], log: Path, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process in a group of its own, which is all that is ever stopped."""
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stderr=errors, text=True, start_new_session=True, **options) as process,
    ):
        try:
            yield process
        finally:
            for end in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(process.pid, end)
                    process.wait(10)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    continue


# Its own server is on loopback, whatever proxy the environment names.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _check_free(port: int) -> None:
    """Another server there would be taken for the one that is started."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # who has just ended there is in nobody's way
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise SystemExit(f"port {port} cannot be had ({error.strerror}): choose another, --port") from error


def _said(trainer: subprocess.Popen[str], word: str, log: Path) -> list[str]:
    """The next words of the trainer's that begin with this one; libraries may print what they like in between."""
    assert trainer.stdout is not None
    for line in trainer.stdout:
        words = line.split()
        if words[:1] == [word]:
            return words
    raise SystemExit(f"the trainer ended before it said {word}:\n{log.read_text()[-3000:]}")


def _healthy(url: str, process: subprocess.Popen[str], log: Path) -> None:
    until = time.monotonic() + 150
    while time.monotonic() < until:
        if process.poll() is not None:
            break
        try:
            _OPENER.open(f"{url}/health", timeout=2).close()
        except OSError:
            time.sleep(0.3)
        else:
            return
    raise SystemExit(f"the server did not come up:\n{log.read_text()[-3000:]}")


def _generate(url: str) -> None:
    def ask(seed: int) -> None:
        ids = [3 + (seed * 977 + place * 31) % 150_000 for place in range(PROMPT)]
        asked = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": ANSWER, "ignore_eos": True, "temperature": 1.0},
        }
        request = urllib.request.Request(  # noqa: S310 our own server
            f"{url}/generate", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        _OPENER.open(request, timeout=120).read()  # the first of a kind waits for its kernels to be compiled

    with ThreadPoolExecutor(REQUESTS) as pool:
        list(pool.map(ask, range(REQUESTS)))


def _compare(size: str, port: int, flags: str, meter: Meter, gpu: Gpu, scratch: Path) -> Iterator[Comparison]:
    folder = scratch / size
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**COMMON, **SIZES[size]}))
    url, log = f"http://127.0.0.1:{port}", folder / "sglang.log"
    server = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder), "--host", "127.0.0.1"]
    server += ["--port", str(port), "--load-format", "dummy", "--skip-tokenizer-init"]
    server += ["--mem-fraction-static", str(FRACTION), "--context-length", str(CONTEXT), *shlex.split(flags)]
    trainer = [sys.executable, "-c", TRAINER, str(folder), str(MICRO_BATCH), "store,recompute"]
    variables = {**os.environ, **OFFLINE}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": variables}
    _check_free(port)
    meter.settle()
    meter.mark()
    with (
        _started(server, log, stdout=subprocess.DEVNULL, env=variables) as engine,
        _started(trainer, folder / "trainer.log", **pipes) as training,
    ):
        assert training.stdin is not None
        _healthy(url, engine, log)
        _generate(url)
        seen = meter.of(engine.pid)
        predicted = _predicted(size, gpu, recompute=False)["generation"]
        yield _told(size, "engine", predicted, seen, meter.more, {})
        _said(training, "imported", folder / "trainer.log")
        meter.mark()
        for mode in ("store", "recompute"):
            print(file=training.stdin, flush=True)
            words = _said(training, mode, folder / "trainer.log")
            own = {"allocated": int(words[1]) / GIB, "reserved": int(words[2]) / GIB}
            # PyTorch gives nothing back by itself: what is held now is this mode's peak, not that of the one before.
            held = meter.now
            predicted = _predicted(size, gpu, recompute=mode == "recompute")["training"]
            yield _told(size, f"trainer, {mode}", predicted, meter.of(training.pid), held, own)
        print(file=training.stdin, flush=True)


def _told(
    size: str,
    process: str,
    predicted: Mapping[str, Any],
    of_process: float | None,
    of_device: float,
    own: Mapping[str, float],
) -> Comparison:
    beside = {"by": "device" if of_process is None else "process", **own, "parts": predicted["parts"]}
    found = Comparison(
        size=size,
        process=process,
        predicted=predicted["total"],
        seen=of_device if of_process is None else of_process,
        beside=beside,
    )
    said = " ".join(f"{name} {value:.2f}" for name, value in own.items())
    print(
        f"{size:>5} {process:<18} predicted {found.predicted:6.2f}  seen {found.seen:6.2f} GiB "
        f"({found.off:+.1%}, by {beside['by']}) {said}",
        flush=True,
    )
    return found


def main(arguments: list[str] | None = None) -> int:
    """Compare all sizes, and say how far off each prediction is."""
    wanted = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    wanted.add_argument("--sizes", type=_sizes, default=list(SIZES), metavar=",".join(SIZES))
    wanted.add_argument("--port", type=int, default=30_000)
    wanted.add_argument("--engine-flags", default=ENGINE_FLAGS)
    wanted.add_argument("--out", type=Path)
    given = wanted.parse_args(arguments)
    gpus = read_gpus()
    if not gpus:
        raise SystemExit("there is no GPU that NVML can read")
    found = list[Comparison]()
    _write(given.out, gpus[0], found)  # now, and not after minutes, if it cannot be
    with (
        closing(Meter()) as meter,
        tempfile.TemporaryDirectory(prefix="refitd-plan-", ignore_cleanup_errors=True) as scratch,
    ):
        for size in given.sizes:
            for one in _compare(size, given.port, given.engine_flags, meter, gpus[0], Path(scratch)):
                found.append(one)
                _write(given.out, gpus[0], found)
    worst = max(found, key=lambda one: abs(one.off))
    print(f"the worst of {len(found)}: {worst.size} {worst.process} is off by {worst.off:+.1%} (limit {LIMIT:.0%})")
    return int(abs(worst.off) > LIMIT)


def _sizes(text: str) -> list[str]:
    """Sizes, separated by commas, each once: a folder is made of each."""
    named = list(dict.fromkeys(text.split(",")))
    if strange := [name for name in named if name not in SIZES]:
        raise argparse.ArgumentTypeError(f"{strange[0]!r} is none of {', '.join(SIZES)}")
    return named


def _write(out: Path | None, gpu: Gpu, found: list[Comparison]) -> None:
    if out is not None:
        rows = [{**asdict(one), "off": round(one.off, 4)} for one in found]
        out.write_text(json.dumps({"gpu": gpu.name, "memory": gpu.memory, "comparisons": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
