"""Followers in a real Ray of two nodes, each with an engine. Prints one JSON document behind the word REPORT.

python ray_followers.py FOLDER
"""

import json
import os
import re
import signal
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

from refitd_client import FollowerStartError, WeightPublisher
from refitd_client.ray import RayFollowers, start_followers

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


def refused(**arguments: Any) -> str:
    """The sentence with which followers are refused."""
    try:
        start_followers(**arguments)
    except FollowerStartError as error:
        return str(error)
    raise AssertionError("they were started")


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def pids(followers: RayFollowers) -> list[int | None]:
    return ray.get([member.actor.pid.remote() for member in followers.members])


def shown(hub: str, model: Path, root: Path, engines: dict[str, list[str]]) -> dict[str, Any]:
    """Start followers, publish, kill them, stop them; what was seen."""
    report: dict[str, Any] = {}
    weights = {name: np.array(tensor) for name, tensor in load_file(model / "model.safetensors").items()}
    urls = [url for (url,) in engines.values()]

    began = time.monotonic()

    def serve(step: int) -> None:
        changed = {name: tensor + np.asarray(0.01 * step, tensor.dtype) for name, tensor in weights.items()}
        publisher.publish(changed, step=step)
        until(lambda: {label(url) for url in urls} == {str(step)})
        print(f"step {step} is served {time.monotonic() - began:.1f} s after the start", flush=True)

    place = str(root / "host-{node}")
    more: dict[str, Any] = {"root": place, "base_model": model, "port": 0, "flags": QUICK}
    with WeightPublisher(root / "hub", RUN, hub) as publisher:
        with start_followers(hub, engines, **more) as followers:
            report["nodes"] = sorted(followers.urls)
            report["ready"] = [
                httpx.get(f"{url}/readyz", trust_env=False).status_code for url in followers.urls.values()
            ]
            serve(1)
            first, before = pids(followers), followers.urls
            for pid in first:
                os.kill(pid or 0, signal.SIGKILL)
            until(lambda: not {None, *first} & set(pids(followers)))
            serve(2)
            report["same urls after a kill"] = before == {
                member.node_id: ray.get(member.actor.ready.remote(PATIENCE)) for member in followers.members
            }
            second, one = pids(followers), followers.members[0]
            ray.kill(one.actor, no_restart=False)
            until(lambda: gone(second[0] or 0))
            ray.get(one.actor.ready.remote(PATIENCE))
            serve(3)
            report["another process after its actor's end"] = pids(followers)[0] not in {None, second[0]}
            third = pids(followers)
        report["ended"] = [gone(pid or 0) for pid in third]
    return report


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
        before = refused(follow=hub, engines=engines)
        ray.init(address=cluster.address, log_to_driver=False)
        bad: dict[str, Any] = {"root": str(root / "bad-{node}"), "port": 0}
        report = shown(hub, model, root, engines) | {
            "before ray.init": before,
            "unknown node": refused(follow=hub, engines={"ab" * 28: ["http://127.0.0.1:1"]}),
            "bad flag": refused(follow=hub, engines=engines, flags=["--no-such-flag"], **bad),
            "expected nodes": sorted(nodes),
        }
    print("REPORT", json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
