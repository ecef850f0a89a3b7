"""Followers in a real Ray of two nodes, each with an engine. Prints one JSON document behind the word REPORT.

python ray_followers.py FOLDER
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ray
from ray.cluster_utils import Cluster
from safetensors.numpy import load_file

sys.path.insert(0, str(Path(__file__).parents[2] / "examples/ray"))
from followers import start_followers

from refitd_client import WeightPublisher

RUN = "run"
PATIENCE = 90.0
QUICK = ("--probe-interval", "0.2", "--scan-interval", "0.2")


def until(what: Callable[[], object]) -> None:
    ends = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < ends
        time.sleep(0.05)


def server(opened: ExitStack, *words: str) -> str:
    """Start a server, to be ended with the program; its URL."""
    command = [sys.executable, "-m", *words, "--port", "0"]
    process = opened.enter_context(
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    )
    opened.callback(process.kill)
    for line in process.stdout or ():
        if (found := re.search(r"ready on (http://127\.0\.0\.1:\d+)", line)) is not None:
            return found[1]
    raise AssertionError(f"{words[0]} has ended")


def label(engine: str) -> str:
    """Which step the engine says that it serves."""
    body = {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}}
    answer = httpx.post(f"{engine}/generate", json=body, timeout=60, trust_env=False).raise_for_status()
    return answer.json()["meta_info"]["weight_version"]


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def pids(followers: dict[str, Any]) -> list[int]:
    return ray.get([actor.pid.remote() for actor in followers.values()])


def urls_of(followers: dict[str, Any]) -> list[str]:
    return ray.get([actor.url.remote() for actor in followers.values()])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def shown(hub: str, model: Path, root: Path, engines: dict[str, list[str]]) -> dict[str, Any]:
    """Start followers, publish, kill them, stop them; what was seen."""
    weights = {name: np.array(tensor) for name, tensor in load_file(model / "model.safetensors").items()}
    urls = [url for (url,) in engines.values()]

    def serve(step: int) -> None:
        changed = {name: tensor + np.asarray(0.01 * step, tensor.dtype) for name, tensor in weights.items()}
        publisher.publish(changed, step=step)
        until(lambda: {label(url) for url in urls} == {str(step)})

    with WeightPublisher(root / "hub", RUN, hub) as publisher:
        followers: dict[str, Any] = {}
        for node, there in engines.items():  # both nodes are on one host
            place, flags = str(root / f"host-{node}"), ("--base-model", str(model), *QUICK)
            followers |= start_followers(hub, {node: there}, *flags, root=place, port=free_port())
        report: dict[str, Any] = {"nodes": sorted(followers)}
        serve(1)
        first, before = pids(followers), urls_of(followers)
        for pid in first:
            os.kill(pid, signal.SIGKILL)
        until(lambda: all(map(gone, first)))
        report["same urls after a kill"] = before == urls_of(followers)
        serve(2)
        second, one = pids(followers), next(iter(followers.values()))
        ray.kill(one, no_restart=False)
        until(lambda: gone(second[0]))
        serve(3)
        third = pids(followers)
        report["another process after its actor's end"] = third[0] != second[0]
        for actor in followers.values():
            ray.kill(actor)
        until(lambda: all(map(gone, third)))
    return report


def refused(hub: str, node: str, root: Path) -> str:
    try:
        start_followers(hub, {node: ["http://127.0.0.1:1"]}, "--no-such-flag", root=str(root / "bad"))
    except ray.exceptions.RayError as error:
        return str(error)
    raise AssertionError("it was started")


def main(root: Path) -> None:
    model = root / "model"
    subprocess.run([sys.executable, "-m", "refitd_embedded", "--make-model", model], check=True, capture_output=True)
    (root / "hub").mkdir()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=1).node_id for _ in range(2)]
    with ExitStack() as opened:
        opened.callback(cluster.shutdown)
        opened.callback(ray.shutdown)
        hub = server(
            opened, "refitd", "serve", "--root", str(root / "hub"), "--state", str(root / "state"), *QUICK,
            "--base-model", str(model),
        )  # fmt: skip
        engines = {node: [server(opened, "refitd_embedded", "--model-path", str(model))] for node in nodes}
        ray.init(address=cluster.address, log_to_driver=False)
        report = shown(hub, model, root, engines) | {
            "bad flag": refused(hub, nodes[0], root),
            "expected nodes": sorted(nodes),
        }
    print("REPORT", json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
