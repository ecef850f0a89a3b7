"""The processes that stand for the engines' ranks in a group of the trainer's, and one that reads its GPU memory.

Each is one rank, and may be killed at any moment (`GroupChild`). The first keeps what the trainer broadcasts, and the
others drop it, since all get the same. A group is of no use when one of its members is lost, so all end together.
"""

import asyncio
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
    TakeTensors,
)
from refitd_client.transport.sending import NCCL, QUIET
from refitd_front.assembly import UpdatePart

MOST_RANKS = 128
"""Engine ranks of a group: each is a process."""
_AS_AREAL = {"NCCL_NVLS_ENABLE": "0"}  # what AReaL's launchers give the trainer, as NCCL: all ranks need the same
_BY_FILES = "or have the trainer update by disk (AReaL: actor.weight_update_mode)"


class MemberLostError(Exception):
    """The group was not joined, or is of no use any more. The message is a sentence."""


class TrainerGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group as the trainer's calls to all engines announce it. `ranks` are those of all engines together."""

    name: str
    address: str
    port: int
    ranks: int
    backend: Literal["gloo", "nccl", "ipc"]


class GroupMembers:
    """The members of one group. One order at a time, which the caller keeps to."""

    def __init__(self, group: TrainerGroup) -> None:
        self._group = group
        self._children = [GroupChild("join", QUIET | NCCL | _AS_AREAL) for _ in range(group.ranks)]
        self._ended = False
        self._threads = ThreadPoolExecutor(group.ranks, thread_name_prefix="refitd-member")

    async def join(self, within: float) -> None:
        """Join, all at the same time. `within` is in seconds.

        Raises:
            MemberLostError: this host cannot, or the group was not made in time. No process is left.
        """
        if find_spec("torch") is None:
            raise MemberLostError(f"'refitd front' needs torch to join the trainer's group: install it, {_BY_FILES}")
        group = self._group
        for seen in await self._answers([LookAround()] * group.ranks, within):  # all, so that all of them are begun
            if isinstance(seen, Surroundings) and (hindrance := hinders_group(group, seen)) is not None:
                await self.end()
                raise MemberLostError(hindrance)
        await self._answers(
            [
                JoinGroup(
                    address=group.address, port=group.port, group=group.name, rank=number + 1, size=group.ranks + 1,
                    backend="gloo" if group.backend == "gloo" else "nccl", device=number, within=within,
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
        """
        if part.counts or part.is_flat or part.handles is not None:
            raise MemberLostError("this kind of part is not taken yet")
        files = [str(folder / file) if file else "", *[""] * (self._group.ranks - 1)]
        orders = [TakeTensors(tensors=list(part.tensors), file=each, within=within) for each in files]
        await self._answers(orders, within)

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
    if group.backend == "nccl" and seen.gpus < group.ranks:
        return (
            f"the trainer makes a group of NCCL, in which each of the engines' {group.ranks} ranks needs a GPU, and "
            f"'refitd front' sees {seen.gpus}: run it where there are as many (CUDA_VISIBLE_DEVICES without the "
            f"trainer's), {_BY_FILES}"
        )
    if group.backend not in seen.backends:
        return f"the torch of 'refitd front' has no {group.backend}: install one that has it, {_BY_FILES}"
    return None


def _answer(child: GroupChild, order: Order, within: float) -> Reply:
    try:
        reply = child.ask(order, within)
    except ChildLostError as error:
        raise MemberLostError(str(error)) from error
    if isinstance(reply, OrderFailed):
        raise MemberLostError(reply.reason)
    if not isinstance(reply, MemberReady | Surroundings):
        raise MemberLostError(f"a member has answered {type(reply).__name__}")
    return reply
