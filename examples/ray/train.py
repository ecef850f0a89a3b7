"""A plain Ray job on a CPU: a trainer actor publishes, two engine actors follow, and one actor has a refitd.

    python examples/ray/train.py [FOLDER]

Each actor that has a server starts it as a process of its own, on its node. Put the refitd on a node that reaches the
engines and sees the root; where the nodes share no file system, one refitd and one root on each node with engines.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import ray
import torch
from transformers import AutoModelForCausalLM

from refitd_client import WeightPublisher

RUN = "exp/ray"


class Server:
    """A process that says where it listens once it does."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-m", *words]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for line in self._process.stdout or ():
            if (found := re.search(r"ready on (http://127\.0\.0\.1:\d+)", line)) is not None:
                self._url = found[1]
                return
        raise RuntimeError(f"{words[0]} has ended")

    def url(self) -> str:
        return self._url

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


@ray.remote(num_cpus=0)
class Engine(Server):
    """In the place of `python -m sglang.launch_server`: refitd's small CPU engine, which has the same API."""

    def __init__(self, model: str) -> None:
        super().__init__("refitd_embedded", "--model-path", model, "--port", "0")

    def answer(self, prompt: list[int]) -> dict[str, Any]:
        params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": params}
        said = httpx.post(f"{self._url}/generate", json=body, timeout=60, trust_env=False).raise_for_status().json()
        return {"tokens": said["output_ids"], "serves": said["meta_info"]["weight_version"]}


@ray.remote(num_cpus=0)
class Refitd(Server):
    """The service. It needs no GPU; it reaches the engines, and sees the root as they do."""

    def __init__(self, root: str, model: str, engines: list[str]) -> None:
        named = [word for url in engines for word in ("--engine", url)]
        super().__init__("refitd", "serve", "--root", root, "--base-model", model, "--port", "0", *named)


@ray.remote(num_cpus=1)
class Trainer:
    """The user's own training loop, with refitd's lines in it."""

    def __init__(self, root: str, model: str, service_url: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.publisher = WeightPublisher(root, RUN, service_url)

    def train(self, step: int) -> dict[str, str | None]:
        torch.manual_seed(step)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        served = self.publisher.publish(self.model, step=step).wait(timeout=60)
        return {engine.id: engine.version for engine in served.engines}


def main(folder: Path) -> None:
    model, root = str(folder / "model"), str(folder / "root")
    subprocess.run([sys.executable, "-m", "refitd_embedded", "--make-model", model], check=True, capture_output=True)
    Path(root).mkdir(exist_ok=True)
    ray.init(num_cpus=2, include_dashboard=False)
    engines = [Engine.remote(model) for _ in range(2)]
    refitd = Refitd.remote(root, model, ray.get([engine.url.remote() for engine in engines]))
    trainer = Trainer.remote(root, model, ray.get(refitd.url.remote()))
    for step in (1, 2, 3):
        steps = ray.get(trainer.train.remote(step))
        servers = ray.get([engine.answer.remote([5, 6, 7]) for engine in engines])
        print(json.dumps({"step": step, "engines": sorted(steps.values()), "servers": servers}), flush=True)
    ray.get([server.stop.remote() for server in (refitd, *engines)])
    ray.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else scratch).resolve())
