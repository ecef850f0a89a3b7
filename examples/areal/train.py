"""A trainer's updates of its engines, step by step as AReaL's FSDP engine does them, with the released AReaL's parts.

    AREAL_LLM_SERVER_ADDRS=ADDRESS python train.py HOW RECORD_ROOT FILEROOT MODEL…     prints one JSON document

HOW is `sglang` or `vllm`, the kind of AReaL's engine client.

Each MODEL stands for what a training step made. For each of them: pause, start the update (which waits for the key in
the name-resolve record), save, add the key, wait for the engines, go on; then generate, as a rollout does.

`sglang-xccl` and `vllm-xccl` broadcast the tensors instead, over a group of this process and the engines' ranks.
"""

import asyncio
import json
import os
import shutil
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import torch.distributed as dist
from areal.api.alloc_mode import ModelAllocation
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, NameResolveConfig
from areal.api.io_struct import ModelRequest, ParamSpec, WeightUpdateMeta
from areal.engine.core.distributed import init_custom_process_group
from areal.engine.sglang_remote import RemoteSGLangEngine
from areal.engine.vllm_remote import RemotevLLMEngine
from areal.infra.platforms import current_platform
from areal.utils import name_resolve, names
from areal.utils.network import find_free_ports, format_host_for_url, gethostip
from safetensors.torch import load_file

PROMPT = [5, 6, 7]
Client = RemoteSGLangEngine | RemotevLLMEngine


def main(how: str, record: str, fileroot: str, *models: str) -> None:
    name_resolve.reconfigure(NameResolveConfig(type="nfs", nfs_record_root=record))
    kind = "vllm" if how.startswith("vllm") else "sglang"
    config = InferenceEngineConfig(
        backend=f"{kind}:d1", experiment_name="exp", trial_name="trial", fileroot=fileroot, request_retries=1
    )
    engine = RemotevLLMEngine(config) if kind == "vllm" else RemoteSGLangEngine(config)
    engine.initialize()  # addresses come from AREAL_LLM_SERVER_ADDRS, as no server has registered
    base = WeightUpdateMeta.from_disk("exp", "trial", fileroot)
    report: list[dict[str, Any]] = [generate(engine)]
    group = None
    if how.endswith("-xccl"):
        engines = len(os.environ["AREAL_LLM_SERVER_ADDRS"].split(","))
        base = WeightUpdateMeta.from_fsdp_xccl(ModelAllocation.from_str(f"{kind}:d{engines}"))
        group = make_group(engine, base)
    for model in models:
        meta = base.with_version(engine.get_version() + 1)
        if how.endswith("-xccl"):
            broadcast(engine, meta, group, Path(model))
        else:
            update(engine, meta, Path(model))
        engine.set_version(engine.get_version() + 1)
        report.append({"version": meta.version, "deleted": is_deleted(Path(str(meta.path))), **generate(engine)})
    print("REPORT " + json.dumps(report), flush=True)
    engine.destroy()


def is_deleted(path: Path) -> bool:
    """Whether AReaL has deleted what it saved: a callback of the update does, which may run after its result."""
    for _ in range(100):
        if not path.exists():
            return True
        time.sleep(0.05)
    return False


def announce(engine: Client, meta: WeightUpdateMeta, model: Path) -> None:
    """The rest of it without the engines: save, and add the key."""
    shutil.copytree(model, str(meta.path))
    key = names.update_weights_from_disk("exp", "trial", engine.get_version())
    name_resolve.add(key, str(datetime.now().timestamp()))  # noqa: DTZ005 - as AReaL writes it


def update(engine: Client, meta: WeightUpdateMeta, model: Path) -> None:
    """As `FSDPEngine._update_weights_from_disk`, with a copy in the place of a save."""
    engine.pause_generation()
    done = engine.update_weights_from_disk(meta)
    announce(engine, meta, model)
    done.result()
    engine.continue_generation()


def make_group(engine: Client, meta: WeightUpdateMeta) -> Any:
    """As `FSDPEngine._init_weight_update_from_distributed`, which rank 0 of the trainer does once."""
    meta.nccl_master_address, meta.nccl_master_port = gethostip(), find_free_ports(1)[0]
    meta.nccl_group_name = "update_weight_group"
    joined = engine.init_weights_update_group(meta)
    group = init_custom_process_group(
        backend=current_platform.communication_backend,
        world_size=meta.gen_allocation.parallel.world_size + 1,
        init_method=f"tcp://{format_host_for_url(meta.nccl_master_address)}:{meta.nccl_master_port}",
        rank=0,
        group_name=meta.nccl_group_name,
    )
    joined.result()
    return group


def broadcast(engine: Client, meta: WeightUpdateMeta, group: Any, model: Path) -> None:
    """As `FSDPEngine._update_weights_from_distributed`, in two buckets."""
    tensors = [each for path in sorted(model.glob("*.safetensors")) for each in load_file(path).items()]
    engine.pause_generation()
    for bucket in (tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]):
        specs = [ParamSpec(name=name, shape=tuple(each.shape), dtype=str(each.dtype)[6:]) for name, each in bucket]
        taken = engine.update_weights_from_distributed(meta, specs)
        for work in [dist.broadcast(each, src=0, group=group, async_op=True) for _, each in bucket]:
            work.wait()
        taken.result()
    engine.continue_generation()


def generate(engine: Client) -> dict[str, Any]:
    """A greedy answer through AReaL's own client."""
    params = GenerationHyperparameters(max_new_tokens=8, greedy=True, ignore_eos=True)
    request = ModelRequest(input_ids=list(PROMPT), gconfig=params)
    answer = asyncio.run(engine.agenerate(request))
    return {"tokens": answer.output_tokens, "versions": answer.output_versions}


if __name__ == "__main__":
    main(*sys.argv[1:])
