"""The plugin in a real SGLang that was started with one more option: each update, held against a stock load.

    python tests/bench/gpu_options.py WHAT --models DIR --url URL --root DIR [--out FILE]

    graphs   with CUDA graphs (without --disable-cuda-graph)
    saver    --enable-memory-saver: the weights' memory is released and resumed between updates
    lora     --enable-lora --max-lora-rank 8 --lora-target-modules q_proj v_proj: an adapter answers throughout
    fp8      --quantization fp8: SGLang makes other weights of those that it loads, and may not load any again

The server was started on DIR/a with the plugin in its environment and REFITD_SGLANG_ROOT=root, which is empty but for
`.refitd`. DIR/a and DIR/b have no manifest: loads of them are SGLang's own. WHAT may be `plain`: none of these.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from made_delta import RUN, write_delta
from memory_used import DEVICE, gpu_free
from plugged_engine import Engine
from timed import timed

from refitd_client import PublishOptions, WeightPublisher
from refitd_client.contract.naming import Order, version_folder
from refitd_client.fingerprint import fingerprints
from support.adapters import write_adapter

ADAPTER, TOKENS = "actor", 32
MODELS = {1: "a", 2: "b"}  # what the first versions hold


class Trial:
    """One server."""

    def __init__(self, what: str, models: Path, url: str, root: Path) -> None:
        self.what, self.models, self.root = what, models, root
        self.engine = Engine(url, root)
        self.out: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        """All of it, or how far it came."""
        released = (self.released,) if self.what == "saver" else ()
        known = (self.prepare, self.full, self.delta, *released, self.back)
        parts = (self.quantised,) if self.what == "fp8" else known
        try:
            for part in parts:
                part()
        except Exception as error:
            self.out["FAILED"] = f"{type(error).__name__}: {error}"[:2000]
        return self.out

    def prepare(self) -> None:
        """What stock loads of both models answer, and the same models as versions."""
        if self.what == "lora":
            folder = write_adapter(self.root / "adapter", self.models / "a", 1)
            self.said("/load_lora_adapter", lora_name=ADAPTER, lora_path=str(folder))
        self.stock: dict[int, list[list[int]]] = {}
        for step in (2, 1):
            self.engine.update(self.models / MODELS[step])
            self.stock[step] = self.answers()
        self.out["answers of a and b differ"] = self.stock[1] != self.stock[2]
        with WeightPublisher(self.root, RUN, options=PublishOptions(fingerprints=True)) as publisher:
            for step, name in MODELS.items():
                self.weights = load_file(self.models / name / "model.safetensors", device=DEVICE)
                publisher.publish(self.weights, step=step)

    def quantised(self) -> None:
        """The weights that it started with, first through the plugin: a stock load of them may be the end of it."""
        before = self.answers()
        with WeightPublisher(self.root, RUN, options=PublishOptions(fingerprints=True)) as publisher:
            publisher.publish(load_file(self.models / "a" / "model.safetensors", device=DEVICE), step=1)
        for name, path in (("by the plugin", self.path(1)), ("again", self.path(1)), ("stock", self.models / "a")):
            served, answer, message = self.engine.told(path)
            self.out[name] = {"served": served, "how": answer.get("how"), "message": message[:400]}
            self.out[name]["answers as at the start"] = self.answers() == before
        self.out["plan"] = self.engine.ask(do="hello")["plan"]

    def full(self) -> None:
        """Learn, and replay if that can be done."""
        found = []
        for step in (1, 2, 1, 2):
            self.engine.prepare(self.path(step), check="headers")
            took, answer = timed(lambda step=step: self.engine.update(self.path(step)))
            same = self.answers() == self.stock[step]
            found.append({"took": round(took, 1), "how": answer["how"], "answers as stock": same, "ms": answer["ms"]})
        self.out["full"] = found
        self.out["plan"] = self.engine.ask(do="hello")["plan"]

    def delta(self) -> None:
        """One of 1 %, then the full version of what it led to; refused where every load goes through the loader."""
        prints = dict(zip(self.weights, fingerprints(self.weights.values()), strict=True))
        folder = write_delta(self.root, 3, 2, self.weights, 0.01, prints)
        ready = self.engine.ask(do="prepare", path=str(folder.relative_to(self.root)))
        took, (served, answer, message) = timed(lambda: self.engine.told(folder))
        by_delta = self.answers()
        self.out["delta"] = {"prepared": ready["ok"], "took": round(took, 1), "served": served, **answer}
        if not served:
            self.out["delta"]["reason"] = message[:400]
        with WeightPublisher(self.root, RUN, options=PublishOptions(fingerprints=True)) as publisher:
            publisher.publish(self.weights, step=4)
        answer = self.engine.update(self.path(4))
        self.out["delta"]["full agrees"] = (self.answers() == by_delta) == served
        self.out["delta"]["the same contents"] = (answer["contents"] == self.out["delta"]["contents"]) == served

    def released(self) -> None:
        """While the weights' memory is away every update is refused; when it is back, a full version is taken."""
        free = gpu_free()
        self.said("/release_memory_occupation", tags=["weights"])
        found: dict[str, Any] = {"freed MiB": round(gpu_free() - free)}
        found["an update meanwhile"] = self.engine.told(self.path(1))[2][:300]
        self.said("/resume_memory_occupation", tags=["weights"])
        served, answer, message = self.engine.told(self.delta_again())
        found["a delta"] = {"served": served, "needs": answer.get("needs"), "message": message[:300]}
        for step in (1, 2):
            took, answer = timed(lambda step=step: self.engine.update(self.path(step)))
            same = self.answers() == self.stock[step]
            found[f"full {step}"] = {"took": round(took, 1), "how": answer["how"], "answers as stock": same}
        self.out["released and resumed"] = found

    def delta_again(self) -> Path:
        """From what is served."""
        prints = dict(zip(self.weights, fingerprints(self.weights.values()), strict=True))
        return write_delta(self.root, 5, 4, self.weights, 0.01, prints)

    def back(self) -> None:
        """A stock load ends it: nothing of the plugin stands in its way."""
        self.engine.update(self.models / "a")
        self.out["stock load afterwards answers as before"] = self.answers() == self.stock[1]
        if self.what == "lora":
            self.said("/unload_lora_adapter", lora_name=ADAPTER)
            self.out["without the adapter"] = self.engine.generate(TOKENS) == self.stock[1][0]

    def answers(self) -> list[list[int]]:
        """Of the model, and of the adapter where there is one."""
        named = [{"lora_path": ADAPTER}] if self.what == "lora" else []
        return [self.engine.generate(TOKENS, **more) for more in ({}, *named)]

    def said(self, route: str, **body: Any) -> None:
        """A call that has to succeed."""
        reply = self.engine.post(route, **body)
        assert reply.status_code == 200, reply.text

    def path(self, step: int) -> Path:
        """A version's folder."""
        return self.root / RUN / version_folder(Order(1, step))


def main() -> None:
    """Read the command line; what is in the file of earlier trials stays."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("plain", "graphs", "saver", "lora", "fp8"))
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("gpu-options.json"))
    options = parser.parse_args()
    found = json.loads(options.out.read_text()) if options.out.exists() else {}
    found[options.what] = Trial(options.what, options.models, options.url, options.root).run()
    options.out.write_text(json.dumps(found, indent=1))
    print(json.dumps(found[options.what], indent=1))


if __name__ == "__main__":
    main()
