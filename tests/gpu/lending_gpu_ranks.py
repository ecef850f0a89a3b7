"""One rank of `test_sharded_gpu.py` that lends its part of the tiny model's weights, under torchrun.

Rank 0 prints the offer's path, takes its tensors back when a pipe is written to, and all end.
"""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import distributed

from refitd_client.transport import exporter
from refitd_client.transport.offer_file import ExportedTensors, read_secret
from support.lending import LendingRank, agreed_on, offer_of_ranks, split
from support.mini_sglang import tiny_weights

DIMS: dict[str, int | None] = {"q.weight": 0, "k.weight": 0, "embed.weight": 0, "down.weight": 1, "turned.weight": 1}


def gathered(mine: Any) -> list[Any]:
    """What all ranks say."""
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, mine)
    return found


def main(root: Path, step: int) -> None:
    """Lend the weights of a step: on this rank's GPU, where one process can open the memory of another."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("gloo")
    tensors, parts = split(tiny_weights(step), DIMS, size, {"v.weight": size - 1})[rank]
    lending = LendingRank(root / "run", rank, {name: each.cuda() for name, each in tensors.items()}, parts)
    agreed = agreed_on(gathered(lending.claims))
    replies = gathered(lending.lend(agreed))
    if rank == 0:
        offer = offer_of_ranks(f"run~v{step:06d}", agreed, replies)
        with ExportedTensors(root / "run", offer, read_secret(root)) as exported:
            sys.stdout.write(f"run/{exported.path.name}\n")
            sys.stdout.flush()
            with (root / "taken").open("rb") as pipe:
                pipe.read(1)
            assert exported.take_back(10.0)
        exporter.end(root / "run")
    distributed.barrier()
    lending.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
