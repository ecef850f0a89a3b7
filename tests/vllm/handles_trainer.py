"""A trainer with a handle of each engine, which has vLLM's four methods: as open-instruct has, with Ray actors.

    handles_trainer.py FOLDER URL…

Read in open-instruct: its pull request 1515, `setup_model_update_group` and `broadcast_weights_to_vllm`; the calls that
begin and end an update are vLLM's since then. Here a handle is vLLM's own client of an address. Prints SENT at the end.
"""

import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from safetensors.torch import load_file
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.nccl_common import trainer_init
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer


def main(folder: str, *urls: str) -> None:
    handles = [HTTPVLLMWeightSyncClient(url) for url in urls]
    threads = ThreadPoolExecutor(len(handles))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    group = {"master_address": "127.0.0.1", "master_port": port, "world_size": len(handles) + 1, "packed": True}
    infos = [group | {"rank_offset": place + 1} for place in range(len(handles))]
    joining = [
        threads.submit(each.init_weight_transfer_engine, info) for each, info in zip(handles, infos, strict=True)
    ]
    mine: PyNcclCommunicator = trainer_init({**group, "rank_offset": 1})
    for each in joining:
        each.result()
    tensors = load_file(f"{folder}/model.safetensors")
    update = {
        "names": list(tensors),
        "dtype_names": [str(each.dtype).removeprefix("torch.") for each in tensors.values()],
        "shapes": [list(each.shape) for each in tensors.values()],
    }
    list(threads.map(lambda each: each.start_weight_update(), handles))
    taking = [threads.submit(each.update_weights, update) for each in handles]
    packed_nccl_broadcast_producer(
        iterator=iter(tensors.items()), group=mine, src=0, post_iter_func=lambda item: item[1]
    )
    for each in taking:
        each.result()
    list(threads.map(lambda each: each.finish_weight_update(), handles))
    print("SENT")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
