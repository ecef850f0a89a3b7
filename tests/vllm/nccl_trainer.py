"""A trainer with vLLM's own trainer classes, unchanged, which sends a checkpoint's tensors to a URL.

    nccl_trainer.py URL PORT HOW FOLDER…    HOW: packed, unpacked, sparse

Prints a line for each update, "SENT", or what was raised. With `sparse` what differs from the folder before is sent,
and of the first nothing. It goes on with a line of standard input.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    ParamMeta,
    WeightSource,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseNCCLTrainerInitInfo, SparseWeightPatch

BUFFER = 3000  # bytes: many chunks, of one tensor and of several


@dataclass
class Tensors(WeightSource):
    """What is in memory now."""

    now: dict[str, torch.Tensor]

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, each.dtype, tuple(each.shape)) for name, each in self.now.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.now.items())


def patches(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> Iterator[SparseWeightPatch]:
    for name, new in after.items():
        flat, old = new.flatten(), before[name].flatten()
        changed = (flat != old).nonzero().flatten()
        if changed.numel():
            yield SparseWeightPatch(name, changed.int(), flat[changed].contiguous(), tuple(new.shape))


def main(url: str, port: str, how: str, *folders: str) -> None:
    address = {"master_address": "127.0.0.1", "master_port": int(port), "world_size": 2, "rank": 0}
    client, source = HTTPVLLMWeightSyncClient(url), Tensors({})
    if how == "sparse":
        engine = WeightTransferTrainerFactory.trainer_init(SparseNCCLTrainerInitInfo(**address), client=client)
    else:
        packed = {"packed": how == "packed", "packed_buffer_size_bytes": BUFFER}
        engine = WeightTransferTrainerFactory.trainer_init(
            NCCLTrainerInitInfo(**address, **packed), client=client, source=source
        )
    before = None
    for folder in folders:
        now = load_file(f"{folder}/model.safetensors")
        try:
            if how == "sparse" and before is not None:
                engine.send_weights(patches(before, now))
            elif how != "sparse":
                source.now = now
                engine.send_weights()
            print("SENT", flush=True)
        except Exception as error:  # the test reads what an unchanged trainer would see
            print(f"RAISED {getattr(getattr(error, 'response', None), 'text', error)}", flush=True)
        before = now
        sys.stdin.readline()
    engine.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
