"""Followers in a Ray job: on each node with engines an actor that has a `refitd serve --follow` as its process.

    followers = start_followers("http://hub:8700", {node_id: ["http://127.0.0.1:30000"]}, "--base-model", "/models/q")

Ray starts an actor again when its follower has ended. A follower ends with its actor: `ray.kill(followers[node_id])`.
"""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

# The kernel ends the follower with its actor, also when Ray kills that one (prctl(2), PR_SET_PDEATHSIG, SIGTERM).
BOUND = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execvp(sys.argv[1], sys.argv[1:])"


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Follower:
    """Has one follower. Without `--token-file` among the words it listens on loopback, for its own node alone."""

    def __init__(self, root: str, *words: str) -> None:
        Path(root).mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-c", BOUND, sys.executable, "-m", "refitd", "serve", "--root", root, *words]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        printed: list[str] = []
        for line in self._process.stdout or ():
            printed.append(line)
            if (found := re.search(r"refitd ready on (https?://\S+?:\d+)", line)) is not None:
                self._url = found[1]
                threading.Thread(target=self._end_with_it, daemon=True).start()
                return
        raise RuntimeError("the follower has ended:\n" + "".join(printed[-20:]))

    def url(self) -> str:
        return self._url

    def pid(self) -> int:
        return self._process.pid

    def _end_with_it(self) -> None:
        for line in self._process.stdout or ():
            print(line, end="", flush=True)
        os._exit(1)


def start_followers(
    upstream: str,
    engines: Mapping[str, Sequence[str]],
    *flags: str,
    root: str = "/dev/shm/refitd",  # noqa: S108 - each node's own memory
    port: int = 8700,
) -> dict[str, Any]:
    """Start a follower on each node with engines, and wait until all listen.

    Args:
        upstream: the hub's URL, or an object store's.
        engines: the URLs of the engines on each node, by the node's id (`ray.get_runtime_context().get_node_id()`).
        flags: more flags of `refitd serve`.
        root: where versions are pulled to on each node. The journal is beside it.
        port: each follower's.

    Returns:
        The actors, by the node's id.
    """
    actors: dict[str, Any] = {}
    for node, urls in engines.items():
        words = ["--state", f"{root}.state", "--follow", upstream, "--port", str(port), *flags]
        words += [word for url in urls for word in ("--engine", url)]
        there = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        actors[node] = Follower.options(scheduling_strategy=there).remote(root, *words)  # type: ignore[attr-defined]
    ray.get([actor.url.remote() for actor in actors.values()])
    return actors
