"""A trainer with vLLM's own classes, unchanged: its `ModuleSource`, and a trainer engine of its base class.

    source_trainer.py serve ROOT RUN URL TOKEN MODEL FOLDER LABEL …
        has refitd's client updated with each folder, then publishes MODEL as vLLM's source of weights
    source_trainer.py ranks ROOT RUN MODEL
        the same source of two ranks of FSDP2, started by torchrun, after one that yields each rank's parts

Prints a JSON list: of each update "" or the error's text, or of what each source came to. Runs where vLLM is installed;
what refitd's client needs beside it is in the folder OWN_PACKAGES.
"""

import json
import os
import sys
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer.base import (
    ModuleSource,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)
from vllm.distributed.weight_transfer.m2n_source import DTensorModuleSource

sys.path.append(os.environ["OWN_PACKAGES"])

from refitd_client import PublishOptions, RefitError, WeightPublisher
from refitd_client.front import VLLMWeightSyncClient as RefitSyncClient


@dataclass
class DiskInit(TrainerInitInfo):
    """What such an engine is made of."""

    backend: ClassVar[str] = "disk"


class DiskEngine(TrainerWeightTransferEngine[DiskInit]):
    """Sends folders, by the calls of vLLM's own engines in their order."""

    init_info_cls = DiskInit

    @classmethod
    def trainer_init(
        cls, init_info: DiskInit, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        client.init_weight_transfer_engine({})
        return cls(client=client, source=source, is_sender=init_info.is_sender)

    def send_weights(self, folder: str, label: str) -> None:
        self.client.start_weight_update()
        self.client.update_weights({"path": folder})
        self.client.finish_weight_update(label)


def serve(root: str, run: str, url: str, token: str, model: str, *updates: str) -> None:
    options = PublishOptions(token=token)
    client = RefitSyncClient(url, run, options=options)
    assert isinstance(client, VLLMWeightSyncClient)
    engine, said = DiskEngine.trainer_init(DiskInit(rank=0), client=client), list[str]()
    for folder, label in zip(updates[::2], updates[1::2], strict=True):
        try:
            engine.send_weights(folder, label)
        except RefitError as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("")
    client.shutdown_weight_transfer_engine()
    with WeightPublisher(root, run, url, options=options) as publisher:
        publisher.publish(ModuleSource(_loaded(model)), step=100).wait(120)
    print("SAID " + json.dumps(said))


def ranks(root: str, run: str, model: str) -> None:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo")
    loaded = _loaded(model)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for layer in loaded.model.layers:
        fully_shard(layer, mesh=mesh)
    module = fully_shard(loaded, mesh=mesh)
    with WeightPublisher(root, run, ranks="all") as publisher:
        try:
            publisher.publish(DTensorModuleSource(module, distributed.get_world_size()), step=1)
        except RefitError as error:
            refused = f"{type(error).__name__}: {error}"
        published = publisher.publish(ModuleSource(module), step=1)
    if publisher.rank == 0:
        print("SAID " + json.dumps([refused, published.version_id]))
    distributed.destroy_process_group()


def _loaded(model: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype="auto")


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    torch.set_num_threads(1)
    {"serve": serve, "ranks": ranks}[what](*words)
