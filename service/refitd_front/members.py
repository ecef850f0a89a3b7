"""The processes that stand for the engines' ranks in a group of the trainer's, and one that reads its GPU memory.

Each is one rank, and may be killed at any moment (`GroupChild`). The first keeps what the trainer broadcasts, and the
others drop it, since all get the same. A group is of no use when one of its members is lost, so all end together.
"""

import asyncio
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import msgspec

from refitd_client.transport.child import (
    ChildLostError,
    GroupChild,
    JoinGroup,
    LookAround,
    MemberReady,
    Order,
    OrderFailed,
    Reply,
    Surroundings,
    TakeHandles,
    TakePatches,
    TakeTensors,
)
from refitd_client.transport.sending import NCCL, QUIET
from refitd_front.assembly import UpdatePart

MOST_RANKS = 128
"""Engine ranks of a group: each is a process."""
_AS_AREAL = {"NCCL_NVLS_ENABLE": "0"}  # what AReaL's launchers give the trainer, as NCCL: all ranks need the same
_BY_FILES = "or have the trainer update by disk (AReaL: actor.weight_update_mode)"
_SENT_MORE = " (Gloo ends a process that is sent more bytes than the call has said: its last words are in the log)"


class MemberLostError(Exception):
    """The group was not joined, or is of no use any more. The message is a sentence."""


class NotKeptError(Exception):
    """The members have taken part, and could not keep what came: the group goes on. The message is a sentence."""


class TrainerGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group as the trainer's calls to all engines announce it. `ranks` are those of all engines together.

    `vllm` is NCCL as vLLM's weight transfer makes it, `ipc` no group: the trainer's memory is read. `chunk` is the size
    at which tensors are packed, 0 where each is sent by itself; `unique_id` is NCCL's, where the trainer sends it.
    """

    name: str
    address: str
    port: int
    ranks: int
    backend: Literal["gloo", "nccl", "vllm", "ipc"]
    chunk: int = 0
    unique_id: str = ""


class GroupMembers:
    """The members of one group. One order at a time, which the caller keeps to."""

    def __init__(self, group: TrainerGroup) -> None:
        self._group = group
        # vLLM makes its group with the variables that its trainer was started with, SGLang and AReaL with their own.
        settings = QUIET if group.backend in {"vllm", "ipc"} else QUIET | NCCL | _AS_AREAL
        self._children = [GroupChild("join", settings) for _ in range(group.ranks)]
        self._ended = False
        self._threads = ThreadPoolExecutor(group.ranks, thread_name_prefix="refitd-member")

    async def join(self, within: float) -> None:
        """Join, all at the same time. `within` is in seconds.

        Raises:
            MemberLostError: this host cannot, or the group was not made in time. No process is left.
        """
        group = self._group
        for seen in await self._answers([LookAround()] * group.ranks, within):  # all, so that all of them are begun
            if isinstance(seen, Surroundings) and (hindrance := hinders_group(group, seen)) is not None:
                await self.end()
                raise MemberLostError(hindrance)
        await self._answers(
            [
                JoinGroup(
                    address=group.address, port=group.port, group=group.name, rank=number + 1, size=group.ranks + 1,
                    backend="nccl" if group.backend == "ipc" else group.backend, device=number, within=within,
                    unique_id=group.unique_id,
                )
                for number in range(group.ranks)
            ],
            within,
        )  # fmt: skip

    async def take(self, part: UpdatePart, folder: Path, file: str, patched: Sequence[str], within: float) -> None:
        """Take what the trainer sends.

        Args:
            folder: where the files of the update lie.
            file: the name of a safetensors file that is made of the tensors, "" where all ranks drop them.
            patched: the names of the files that a patch changes.
            within: seconds.

        Raises:
            MemberLostError: not all have arrived in time. No process is left.
            NotKeptError: they cannot be kept.
        """
        tensors, others = list(part.tensors), self._group.ranks - 1
        orders: list[Order]
        if part.handles is not None:
            by_gpu, is_packed = list(part.handles.by_gpu), part.handles.is_packed
            orders = [TakeHandles(tensors=tensors, handles=by_gpu, is_packed=is_packed, file=str(folder / file))]
        elif part.counts:
            files = [str(folder / each) for each in patched]
            orders = [
                TakePatches(tensors=tensors, counts=list(part.counts), files=each, within=within)
                for each in (files, *[[]] * others)
            ]
        else:
            chunk = sys.maxsize if part.is_flat else self._group.chunk
            names = [str(folder / file) if file else "", *[""] * others]
            orders = [TakeTensors(tensors=tensors, file=each, within=within, chunk=chunk) for each in names]
        for reply in await self._answers(orders, within):
            if isinstance(reply, OrderFailed):
                raise NotKeptError(reply.reason)

    async def end(self) -> None:
        await asyncio.to_thread(self.kill)

    def kill(self) -> None:
        """As `end`, for where there is no loop any more."""
        self._ended = True
        for child in self._children:
            child.end()
        self._threads.shutdown(wait=False)

    async def _answers(self, orders: Sequence[Order], within: float) -> list[Reply]:
        if self._ended:
            raise MemberLostError("the group's members were ended")
        if find_spec("torch") is None:
            raise MemberLostError(f"'refitd front' needs torch to take the trainer's tensors: install it, {_BY_FILES}")
        loop = asyncio.get_running_loop()
        pairs = zip(self._children, orders, strict=True)
        asked = [loop.run_in_executor(self._threads, _answer, child, order, within) for child, order in pairs]
        try:
            return await asyncio.gather(*asked)
        except BaseException:
            await self.end()
            raise


def hinders_group(group: TrainerGroup, seen: Surroundings) -> str | None:
    """Why this host cannot stand for the engines in a group, and what to do; None where it can. Pure."""
    if group.backend != "gloo" and seen.gpus < group.ranks:
        return (
            f"the trainer makes a group of NCCL, in which each of the engines' {group.ranks} ranks needs a GPU, and "
            f"'refitd front' sees {seen.gpus}: run it where there are as many (CUDA_VISIBLE_DEVICES without the "
            f"trainer's), {_BY_FILES}"
        )
    needed = "nccl" if group.backend == "vllm" else group.backend
    if needed not in seen.backends:
        return f"the torch of 'refitd front' has no {needed}: install one that has it, {_BY_FILES}"
    return None


def _answer(child: GroupChild, order: Order, within: float) -> Reply:
    try:
        reply = child.ask(order, within)
    except ChildLostError as error:
        lost = f"{error}{'' if isinstance(order, LookAround | JoinGroup) else _SENT_MORE}"
        raise MemberLostError(lost) from error
    if isinstance(reply, OrderFailed) and not reply.in_step:
        raise MemberLostError(reply.reason)
    if not isinstance(reply, MemberReady | Surroundings | OrderFailed):
        raise MemberLostError(f"a member has answered {type(reply).__name__}")
    return reply
