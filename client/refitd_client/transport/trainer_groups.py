"""The groups that trainers make for their engines' ranks, as a rank that receives.

`torch`: a trainer makes a group beside its own (OpenRLHF's `init_custom_process_group`, which AReaL, SGLang and slime
have copied): torch's rendezvous over TCP, a prefix of the group's name, and torch's own helper.

`vllm`: vLLM's weight transfer (`StatelessProcessGroup` and `PyNcclCommunicator` of vLLM 0.29 to 0.33): a TCP store in
which rank 0 leaves NCCL's unique id as a pickle, and NCCL's own functions, beginning with an all-reduce of one element.
The pickle is not loaded: the id is the one string of 128 bytes in it. torch's group of NCCL is given the id in a store
of this process, where it looks for the one that rank 0 has made.
"""

import base64
import os
import pickletools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as distributed

from refitd_client.transport.child import JoinGroup
from refitd_client.transport.membership import TransferError, WaitLimit, nccl_group

c10d: Any = distributed.distributed_c10d  # torch's types leave out what makes a group beside the default one
dist: Any = distributed
TRAINER_RANK = 0
_UNIQUE_ID_BYTES = 128
_UNIQUE_ID_KEY = "broadcast_from/0/0"
_MOST_PICKLE = 4096

Broadcast = Callable[[torch.Tensor, WaitLimit], torch.Tensor]
"""Receives into a tensor that is on the group's device, and returns it. With NCCL only the stream waits."""


def join(order: JoinGroup) -> tuple[Broadcast, str]:
    """Join a group. Return what receives a broadcast, and the device that it receives on.

    Raises:
        RuntimeError, ValueError: the group was not made in time.
        TransferError: this process cannot be a rank of such a group.
    """
    return _vllm(order) if order.backend == "vllm" else _torch(order)


def _torch(order: JoinGroup) -> tuple[Broadcast, str]:
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # the store is the trainer's, not that of a torchrun
    device = _gpu(order.device) if order.backend == "nccl" else "cpu"
    within = timedelta(seconds=order.within)
    method = f"tcp://{order.address}:{order.port}"
    store, rank, size = next(c10d.rendezvous(method, order.rank, order.size, timeout=within))
    store.set_timeout(within)
    store = c10d.PrefixStore(order.group, store)
    backend = c10d.Backend(order.backend)
    group, _ = c10d._new_process_group_helper(  # noqa: SLF001 - what all who make such a group call
        size, rank, [], backend, store, group_name=order.group, timeout=within, group_desc=order.group
    )
    c10d._world.pg_group_ranks[group] = {each: each for each in range(size)}  # noqa: SLF001 - as above

    def receive(tensor: torch.Tensor, waiting: WaitLimit) -> torch.Tensor:
        waiting.left()
        work = dist.broadcast(tensor, src=TRAINER_RANK, group=group, async_op=True)
        if device == "cpu":
            work.wait(timedelta(seconds=waiting.left()))
        else:
            work.wait()
        return tensor

    return receive, device


def _vllm(order: JoinGroup) -> tuple[Broadcast, str]:
    within = timedelta(seconds=order.within)
    if order.unique_id:
        unique_id = base64.b64decode(order.unique_id)
    else:
        store = dist.TCPStore(order.address, order.port, order.size, is_master=False, timeout=within)
        unique_id = unique_id_in(store.get(_UNIQUE_ID_KEY))
    known = dist.HashStore()
    known.set("0", unique_id)
    device = _gpu(order.device)
    group = nccl_group(known, order.rank, order.size, order.within)
    options = dist.BroadcastOptions()
    options.rootRank = TRAINER_RANK
    one = torch.zeros(1, device=device)
    group.allreduce([one]).wait()
    one.cpu()  # waits until all have joined

    def receive(tensor: torch.Tensor, waiting: WaitLimit) -> torch.Tensor:
        waiting.left()
        group.broadcast([tensor], options).wait()
        return tensor

    return receive, device


def _gpu(number: int) -> str:
    torch.cuda.set_device(number)
    return f"cuda:{number}"


def unique_id_in(pickled: bytes) -> bytes:
    """Return NCCL's unique id from the pickle of one, which is not loaded.

    Raises:
        TransferError: it holds none.
    """
    if len(pickled) <= _MOST_PICKLE:
        try:
            found = {arg for _, arg, _ in pickletools.genops(pickled) if isinstance(arg, bytes)}
        except ValueError:
            found = set[bytes]()
        ids = [each for each in found if len(each) == _UNIQUE_ID_BYTES]
        if len(ids) == 1:
            return ids[0]
    raise TransferError("the trainer's store holds no unique id of NCCL, as vLLM's weight transfer leaves it there")
