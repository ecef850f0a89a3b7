"""What goes wrong in an update of verl's, with the parts of examples/verl/update.py. Prints one JSON document.

    python verl_failures.py EXAMPLES FOLDER MODEL

A server that is slow: verl waits for it, and says which one it was when the wait is over. A rank that dies while it
publishes: no version becomes visible, and the servers go on with the one before.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, sys.argv[1])

import ray
import update
from verl.checkpoint_engine import CheckpointEngineManager


class Update:
    """verl's manager with its workers, and what it raised."""

    def __init__(self, root: Path, url: str, model: str) -> None:
        update.EmbeddedReplica.flags = ("--load-delay", "2")
        self.root = root
        config = update.settings(str(root), url, wait=120.0)
        self.actor, self.replicas = update.start_actor(config, model), update.start_replicas(config, model)
        self.manager = CheckpointEngineManager(config, self.actor, self.replicas)

    def told(self, rank: int, call: Callable[[Any], None]) -> None:
        """Have a rank of the actor do something to its worker."""
        ray.get(self.actor.workers[rank].__ray_call__.remote(call))

    def to(self, step: int) -> dict[str, Any]:
        try:
            self.manager.update_weights(global_steps=step)
            error = None
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        self.manager.resume_generation_replicas()  # what verl has paused, where it gave up
        served = [answer["serves"] for answer in update.answers(self.replicas)]
        folders = sorted(path.name for path in (self.root / update.RUN).glob("v*"))
        return {"error": error, "serve": served, "versions": folders}


def patient(seconds: float) -> Callable[[Any], None]:
    def set_wait(worker: Any) -> None:
        worker.checkpoint_engine._wait = seconds

    return set_wait


def dies(worker: Any) -> None:
    async def publish(*_: Any) -> None:
        os._exit(1)

    worker.checkpoint_engine._publish = publish


def main(folder: Path, model: str) -> None:
    root = folder / "root"
    root.mkdir()
    update.start_ray()
    with update.service(str(root), model) as url:
        job = Update(root, url, model)
        report = {"slow": job.to(0)}
        job.told(0, patient(0.5))
        report["late"] = job.to(1)
        job.told(0, patient(120.0))
        report["again"] = job.to(1)
        job.told(1, dies)
        report["dead"] = job.to(2)
        for replica in job.replicas:
            ray.get(replica.servers[0].stop.remote())
    ray.shutdown()
    print("REPORT " + json.dumps(report), flush=True)


main(Path(sys.argv[2]), sys.argv[3])
