"""What a member process does: it joins a group that a trainer makes for its engines, as a rank of one of these.

It takes part in the trainer's broadcasts. The tensors go to a file, or are dropped.

The group is made as trainers make one beside their own (OpenRLHF's `init_custom_process_group`, which AReaL and SGLang
have copied): torch's rendezvous over TCP, a prefix of the group's name, and torch's own helper. Each rank has a process
of its own, since the helper takes a name once in a process, and NCCL one GPU.
"""

import mmap
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed

from refitd_client.checkpoint.header import Entry, encode, file_order
from refitd_client.errors import InvalidWeightsError
from refitd_client.files.plain_file import open_plain
from refitd_client.tensors import TORCH_NAMES
from refitd_client.transport.child import (
    JoinGroup,
    LookAround,
    MemberReady,
    Order,
    OrderFailed,
    Reply,
    Surroundings,
    TakeTensors,
)
from refitd_client.transport.membership import TransferError, WaitLimit, first_line
from refitd_client.transport.memory import view
from refitd_client.transport.sending import available

c10d: Any = distributed.distributed_c10d  # torch's types leave out what makes a group beside the default one
dist: Any = distributed
_TRAINER_RANK = 0
_CHANCE_BYTES = 16


class MemberProcess:
    """The work of a member process. `work` raises nothing for what others do."""

    def __init__(self) -> None:
        self._group: Any = None
        self._device = "cpu"

    def work(self, order: Order, stopped: Callable[[], bool]) -> Reply:
        try:
            match order:
                case LookAround():
                    return Surroundings(backends=sorted(available()), gpus=torch.cuda.device_count())
                case JoinGroup():
                    self._join(order)
                case TakeTensors():
                    self._take(order, WaitLimit(order.within, stopped))
                case _:
                    return OrderFailed("it is a member, and sends nothing")
        except (TransferError, InvalidWeightsError, OSError, ValueError, RuntimeError) as error:
            return OrderFailed(first_line(error))
        return MemberReady()

    def end(self) -> None:
        """Nothing of it outlives the process: the file is its parent's."""

    def _join(self, order: JoinGroup) -> None:
        """Join. Raises RuntimeError, ValueError: the group was not made in time."""
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # the store is the trainer's, not that of a torchrun
        if order.backend == "nccl":
            self._device = f"cuda:{order.device}"
            torch.cuda.set_device(order.device)
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
        self._group = group

    def _take(self, order: TakeTensors, waiting: WaitLimit) -> None:
        if self._group is None:
            raise TransferError("it is in no group")
        entries = [Entry(name=name, dtype=dtype, shape=shape) for name, dtype, shape in order.tensors]
        if not order.file:
            self._drop(entries, waiting)
            return
        with _tensors_of(Path(order.file), entries) as tensors:
            for entry in entries:
                place = tensors.pop(entry.name)
                if self._device == "cpu":
                    with _whole(entry.name, place):
                        self._broadcast(place, waiting)
                else:
                    place.copy_(self._broadcast(torch.empty_like(place, device=self._device), waiting))
                del place

    def _drop(self, entries: Sequence[Entry], waiting: WaitLimit) -> None:
        """Take part without keeping anything. A rank passes on what it receives, so it needs memory for a tensor."""
        for entry in entries:
            dtype = getattr(torch, TORCH_NAMES[entry.dtype])
            self._broadcast(torch.empty(entry.shape, dtype=dtype, device=self._device), waiting)
        if self._device != "cpu":
            torch.cuda.synchronize()

    def _broadcast(self, tensor: torch.Tensor, waiting: WaitLimit) -> torch.Tensor:
        """Receive into a tensor. With NCCL only this process's stream waits for it."""
        waiting.left()
        work = dist.broadcast(tensor, src=_TRAINER_RANK, group=self._group, async_op=True)
        if self._device == "cpu":
            work.wait(timedelta(seconds=waiting.left()))
        else:
            work.wait()
        return tensor


@contextmanager
def _whole(name: str, tensor: torch.Tensor) -> Generator[None]:
    """Look whether a tensor is received to its end. Gloo takes fewer bytes for the whole, and leaves the rest as it is.
    Raises TransferError: the trainer has sent less than it has said.
    """
    flat = tensor.view(-1).view(torch.uint8)
    # What the tensor's end is before: a NaN, which is no weight; else chance, in enough bytes that it does not recur.
    count = tensor.element_size() if tensor.is_floating_point() else _CHANCE_BYTES
    end = flat[-count:] if len(flat) >= count else flat[:0]
    before = torch.full_like(end, 0xFF) if tensor.is_floating_point() else torch.randint_like(end, 256)
    end.copy_(before)
    yield
    if len(end) and torch.equal(end, before):
        raise TransferError(f"less was sent of tensor {name} than the {len(flat)} bytes that the call has said")


@contextmanager
def _tensors_of(path: Path, entries: Sequence[Entry]) -> Generator[dict[str, torch.Tensor]]:
    """A new safetensors file of these tensors, which are to be filled inside the context: views of the file by name.
    Raises OSError: it cannot be made, or there is no room for it; InvalidWeightsError: they are too many for one
    header.
    """
    ordered = sorted(entries, key=file_order)
    head = encode(ordered)
    size = len(head) + sum(entry.nbytes for entry in ordered)
    fd = open_plain(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)  # a file with holes would end the process where memory runs out
        os.pwrite(fd, head, 0)
        memory = mmap.mmap(fd, size)
    finally:
        os.close(fd)
    tensors: dict[str, torch.Tensor] = {}
    offset = len(head)
    for entry in ordered:
        tensors[entry.name] = view(memory, offset, entry.dtype, entry.shape)
        offset += entry.nbytes
    yield tensors
