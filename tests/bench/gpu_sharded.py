"""From `publish()` to answers, from a trainer of several ranks to a tensor-parallel engine.

    CUDA_VISIBLE_DEVICES=2,3 torchrun --nproc-per-node 2 tests/bench/gpu_sharded.py --models DIR --root DIR
        --service URL [--rounds 6] [--warm 6] [--transport nccl gloo handover disk delta] [--shadow gpu] [--random]
        [--out FILE]

A server with `--tp-size 2` was started on DIR/a with the plugin in its environment and REFITD_SGLANG_ROOT=root, and a
service on that root for it. Each rank has a GPU of its own, which may be an engine rank's for a hand-over. The weights
of DIR/b are sharded as FSDP2 shards them; with `--random` others of DIR/a's names and shapes are made as shards, for
models that no GPU holds twice. About 1 % of all elements are changed before each publication, of which the files
follow. Rank 0 prints, and writes medians in milliseconds with the fastest and the slowest:

    answered     from the call of publish() until the engine generates by the new, proved weights: as the publisher
                 heard it, or for files as the service said it
    held         until publish() returns on rank 0: the tensors may change
    sent_bytes   what was brought to all engine ranks together; 0 for a hand-over, which they copy themselves
    stages       what rank 0 says of its own: `compare` (all ranks look for what changed), `encode`, `write`, `sync`;
                 what the service says of the version: `seen`, `validate`; and of the update: `pause`, `load`, `verify`
    files        the bytes of each version's files, and whether it is a delta: the first one of `delta` is not
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from gpu_handover import spread, step_on
from safetensors.torch import load_file
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from refitd_client import PublishOptions, RefitClient, WeightPublisher
from refitd_client.write.source_folder import open_checkpoint

RUN, PATIENCE = "sharded", 120.0


class Tensors(nn.Module):
    """The tensors of a checkpoint under their own names, as one module to shard."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.names = list(weights)
        self.weights = nn.ParameterList(nn.Parameter(weights[name], requires_grad=False) for name in self.names)

    def named(self) -> dict[str, Any]:
        """This rank's shards, as DTensors, by the checkpoint's names."""
        return dict(zip(self.names, self.weights, strict=True))


def made(folder: Path, mesh: Any) -> dict[str, Any]:
    """Random weights of a checkpoint's names, shapes and dtypes, each rank's rows of them."""
    found: dict[str, Any] = {}
    rank, size = mesh.get_local_rank(), mesh.size()
    for entries in open_checkpoint(folder).shards.values():
        for entry in entries:
            shape = tuple(entry.shape)
            rows = len(range(shape[0])[rank * -(-shape[0] // size) : (rank + 1) * -(-shape[0] // size)])
            part = torch.randn(rows, *shape[1:], device="cuda", dtype=torch.bfloat16) * 0.02
            stride = torch.empty(shape, device="meta").stride()
            found[entry.name] = DTensor.from_local(
                part, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
            )
    return found


def local(sharded: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What this rank itself holds of each tensor."""
    return {name: tensor.to_local() for name, tensor in sharded.items() if tensor.to_local().numel()}


def measured(
    publisher: WeightPublisher, client: RefitClient, sharded: dict[str, Any], steps: range, warm: int, transport: str
) -> dict[str, Any]:
    """Publish these steps, so many of them for warming up. On all ranks; the figures are this rank's."""
    answered: list[float] = []
    held: list[float] = []
    handed: list[Any] = []
    files: list[str] = []
    stages: dict[str, list[float]] = {}
    for step in steps:
        time.sleep(0.5)
        step_on(local(sharded))
        distributed.barrier()
        began = time.monotonic()
        publication = publisher.publish(sharded, step=step, transport=transport)  # type: ignore[arg-type]
        held.append((time.monotonic() - began) * 1000)
        client.wait(publication.version_id, "served", PATIENCE)
        told = publication.handed
        heard = None if told is None or not told.engines or told.timings is None else told.timings["taken"]
        answered.append((time.monotonic() - began) * 1000 if heard is None else heard)
        handed.append(None if told is None else str(told))
        committed = publication.committed(PATIENCE)
        files.append(f"{committed.kind.value} {committed.bytes} {committed.why_full or ''}".strip())
        publication.wait(PATIENCE, "sealed")
        last = client.engines().items[0].last_attempt
        seen = (
            committed.timings | client.version(publication.version_id).timings | ({} if last is None else last.timings)
        )
        for stage, took in seen.items() if step >= steps[warm] else ():
            stages.setdefault(stage, []).append(took)
    return {
        f"{transport}: answered ms": spread(answered[warm:]),
        f"{transport}: held ms": spread(held[warm:]),
        f"{transport}: handed": handed,
        f"{transport}: stages ms": {stage: spread(times) for stage, times in stages.items()},
        f"{transport}: files": files,
    }


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--service", required=True)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--warm", type=int, default=6)
    ways = ["nccl", "gloo", "handover", "disk", "delta"]
    parser.add_argument("--transport", nargs="*", default=["nccl"], choices=ways)
    parser.add_argument("--shadow", choices=["gpu", "stream"], default="stream")
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("gpu-sharded.json"))
    options = parser.parse_args()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    distributed.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    mesh = init_device_mesh("cuda", (size,))
    if options.random:
        sharded = made(options.models / "a", mesh)
    else:
        module = Tensors(load_file(options.models / "b" / "model.safetensors", device=str(device)))
        fully_shard(module, mesh=mesh)
        sharded = module.named()
    out: dict[str, Any] = {
        "ranks": size,
        "shadow": options.shadow,
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in sharded.values()),
    }
    with (
        WeightPublisher(
            options.root, RUN, options.service, ranks="all", options=PublishOptions(shadow=options.shadow)
        ) as publisher,
        RefitClient(options.service) as client,
    ):
        for number, transport in enumerate(options.transport):
            first = 1 + number * (options.warm + options.rounds)
            steps = range(first, first + options.warm + options.rounds)
            out |= measured(publisher, client, sharded, steps, options.warm, transport)
            if rank == 0:
                out["engines"] = str(client.engines().items)[:2000]
                options.out.write_text(json.dumps(out, indent=1))
    if rank == 0:
        print(json.dumps(out, indent=1))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
