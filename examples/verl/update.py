"""verl updates its rollout servers through refitd, on a CPU: two ranks, two servers, three steps.

    python examples/verl/update.py [FOLDER]

It starts Ray, a refitd and the servers, and ends them. verl's own are the registry of backends, the manager of the
update, the worker groups, the rollout workers, and the two methods of the actor's worker that the manager calls. In the
place of verl's SGLang servers are small CPU engines (embedded_rollout.py), and in the place of the training a step that
changes the weights: verl's training engines need a GPU. `grpo.sh` is the command for GPUs.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
from embedded_rollout import NAME, EmbeddedReplica
from omegaconf import OmegaConf
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig, RolloutConfig
from verl.workers.engine_workers import ActorRolloutRefWorker

RUN = "grpo/trial"
RANKS, SERVERS, STEPS = 2, 2, 3


def settings(root: str, service_url: str, **more: Any) -> CheckpointEngineConfig:
    """What a user writes into verl's configuration."""
    return CheckpointEngineConfig(
        backend="refitd",
        custom_backend_module="refitd_client.trainers.verl",
        engine_kwargs={"refitd": {"root": root, "run": RUN, "service_url": service_url, **more}},
    )


class Actor(ActorRolloutRefWorker):
    """A rank of verl's actor, with FSDP2 on a CPU. `update_weights` and `execute_checkpoint_engine` are verl's."""

    def __init__(self, config: CheckpointEngineConfig, model: str) -> None:
        Worker.__init__(self)
        initialize_global_process_group_ray(backend="cpu:gloo")
        torch.set_num_threads(1)
        self.config = OmegaConf.create({"rollout": {"checkpoint_engine": {"backend": config.backend}}})
        whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.model = fully_shard(whole, mesh=init_device_mesh("cpu", (self.world_size,)))
        self.actor = SimpleNamespace(engine=self)
        import_external_libs(config.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend, is_master=self.rank == 0, bucket_size=1 << 20, **config.engine_kwargs[config.backend]
        )

    def get_per_tensor_param(self) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        """As verl's FSDP engine: every rank gathers every tensor, one after the other."""
        return ((name, part.full_tensor()) for name, part in self.model.state_dict().items()), None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, step: int) -> None:
        torch.manual_seed(step)
        with torch.no_grad():
            for part in self.model.parameters():
                part.to_local().add_(torch.randn_like(part.to_local()) * 0.05)


def start_actor(config: CheckpointEngineConfig, model: str, worker: type[Actor] = Actor) -> RayWorkerGroup:
    """The actor's ranks, as verl's trainer starts them."""
    pool = RayResourcePool([RANKS], use_gpu=False, max_colocate_count=1)
    init = RayClassWithInitArgs(ray.remote(worker), config=config, model=model)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=init, use_gpu=False)


def start_replicas(config: CheckpointEngineConfig, model: str) -> list[EmbeddedReplica]:
    """The rollout servers with their workers, as verl's trainer starts them on GPUs of their own."""
    rollout = RolloutConfig(
        name=NAME,
        tensor_model_parallel_size=1,
        free_cache_engine=False,
        enable_sleep_mode=False,
        checkpoint_engine=config,
    )
    replicas = [EmbeddedReplica(rank, rollout, model, gpus_per_node=1) for rank in range(SERVERS)]
    for replica in replicas:
        asyncio.run(replica.init_standalone())
    return replicas


@contextmanager
def service(root: str, model: str) -> Iterator[str]:
    """A refitd that has no engine yet: the backend adds those that verl starts. Yields its URL."""
    command = [sys.executable, "-m", "refitd", "serve", "--root", root, "--base-model", model, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        for line in process.stdout or ():
            if (found := re.search(r"ready on (http://127\.0\.0\.1:\d+)", line)) is not None:
                yield found[1]
                return
        raise RuntimeError("the service has ended")
    finally:
        process.terminate()
        process.wait()


def start_ray() -> None:
    """Ray with GPUs that are only counted: verl's rollout workers ask for one each."""
    here = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ.setdefault("RAY_worker_niceness", "0")  # on a busy machine workers would wait for minutes
    variables = {"PYTHONPATH": here, "OMP_NUM_THREADS": "1", "VERL_USE_EXTERNAL_MODULES": "embedded_rollout"}
    ray.init(num_cpus=16, num_gpus=SERVERS, include_dashboard=False, runtime_env={"env_vars": variables})


def answers(replicas: list[EmbeddedReplica]) -> list[dict[str, Any]]:
    """What each server answers to one prompt."""
    return ray.get([replica.servers[0].generate.remote([5, 6, 7]) for replica in replicas])


def main(folder: Path) -> None:
    model, root = str(folder / "model"), str(folder / "root")
    if not (folder / "model").exists():
        subprocess.run([sys.executable, "-m", "refitd_embedded", "--make-model", model], check=True)
    Path(root).mkdir(exist_ok=True)
    print("starting Ray and refitd ...", flush=True)
    start_ray()
    with service(root, model) as url:
        config = settings(root, url, dtype="float32")
        print(f"starting {RANKS} ranks of the actor and {SERVERS} servers, which takes some minutes ...", flush=True)
        actor, replicas = start_actor(config, model), start_replicas(config, model)
        manager = CheckpointEngineManager(config, actor, replicas)
        for step in range(STEPS):
            metrics = manager.update_weights(global_steps=step)  # step 0: what the training begins with
            print(json.dumps({"step": step, "servers": answers(replicas), **metrics}), flush=True)
            actor.train(step)
        for replica in replicas:
            ray.get(replica.servers[0].stop.remote())
    ray.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else scratch).resolve())
