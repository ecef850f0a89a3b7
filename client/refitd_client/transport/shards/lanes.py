"""A member of lanes: their groups, and the script that it follows in its memory.

A group is made in the order of the lanes' numbers, and blocks go in the order of the script, on all members: so no two
wait for each other. The groups are kept until another number is named, or one has failed.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from refitd_client.transport.group.membership import BroadcastGroup, TransferError, WaitLimit, hear
from refitd_client.transport.group.transfer import BLOCK_BYTES, IN_FLIGHT, Backend, Go, key
from refitd_client.transport.shards.packing import PackedPlaces
from refitd_client.transport.shards.script import MOST_LANES, BlockWord, MemberScript


class LaneMember:
    """One sender's or receiver's lanes. `number` is that of the lanes that it holds, 0 for none."""

    def __init__(self) -> None:
        self.number = 0
        self._script = MemberScript()
        self._packed: tuple[PackedPlaces, MemberScript] | None = None
        self._groups: list[BroadcastGroup] = []
        self._ring: list[torch.Tensor] = []

    def follow(self, go: Go, name: str, backend: Backend, store: Any, host: str, waiting: WaitLimit) -> None:
        """Be a member of the lanes that `go` names: those that stand, or new ones.

        Args:
            go: the first sender's word.
            name: this member's.
            backend: `gloo` or `nccl`.
            store: the first sender's.
            host: the address of the store.
            waiting: until when all have to have joined.

        Raises:
            TransferError: there is no script for this member, or not all have joined in time.
        """
        if self.number == go.group:
            return
        self.leave()
        self._script = hear(store, key(f"lanes {go.group}", "script", name), MemberScript, waiting)
        for lane in self._script.lanes:
            if name not in lane.members:
                raise TransferError("the script is another member's")
            ranks = {member: rank for rank, member in enumerate(lane.members) if rank}
            own = Go(group=go.group * MOST_LANES + lane.number, ranks=ranks, streams=go.streams)
            self._groups.append(BroadcastGroup(backend, store, own, lane.members.index(name), host, waiting))
        self.number = go.group

    def run(
        self,
        memory: torch.Tensor,
        backend: Backend,
        waiting: WaitLimit,
        *,
        sends: bool,
        places: PackedPlaces | None = None,
    ) -> int:
        """Do all that the script says. Returns the bytes that this member's lanes have brought to their receivers.

        Args:
            memory: all of this member's memory, as bytes: what it sends from, or receives into.
            backend: that of the lanes.
            waiting: until when all has to be done.
            sends: whether it is a sender.
            places: where tensors lie in a receiver's memory that has not the whole version.

        Raises:
            TransferError: the script goes beyond the memory, a member is gone, or the time was over.
        """
        script = self._script if places is None else self._packed_by(places)
        if (fault := script.fault(memory.numel())) is not None:
            raise TransferError(f"the script cannot be followed: {fault}")
        under_way: deque[tuple[BroadcastGroup, Any, Callable[[], None]]] = deque()

        def finish() -> None:
            group, work, arrived = under_way.popleft()
            group.end(work, waiting)
            arrived()

        try:
            for number, block in enumerate(script.blocks):
                if len(under_way) == IN_FLIGHT[backend]:
                    finish()
                sent, arrived = self._block(number, block, memory, backend, sends=sends)
                group = self._groups[block.lane]
                under_way.append((group, group.begin(sent), arrived))
            while under_way:
                finish()
        except RuntimeError as error:  # of a copy
            raise TransferError(f"a block could not be copied: {error}") from error
        for group in self._groups:
            group.settle()
        return script.delivered

    def leave(self) -> None:
        """Leave all lanes. Members that wait in one get an error, where the backend can tell them."""
        groups, self._groups, self.number, self._packed = self._groups, [], 0, None
        for group in groups:
            group.close()

    def _packed_by(self, places: PackedPlaces) -> MemberScript:
        """The script for memory that is packed, made once."""
        if self._packed is None or self._packed[0] is not places:
            self._packed = places, places.of(self._script)
        return self._packed[1]

    def _block(
        self, number: int, block: BlockWord, memory: torch.Tensor, backend: Backend, *, sends: bool
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        """What is broadcast, and what is to be done when it has arrived."""
        moves, device = block.moves, "cuda" if backend == "nccl" else "cpu"
        if len(moves) == 1 and moves[0][3] == 1 and memory.device.type == device:
            offset, _, width, _ = moves[0]
            return memory[offset : offset + width], lambda: None
        slot = self._slot(number, backend, device)[: block.nbytes]
        if sends:
            _copy(memory, slot, moves, pack=True)
            return slot, lambda: None
        return slot, lambda: _copy(memory, slot, moves, pack=False)

    def _slot(self, number: int, backend: Backend, device: str) -> torch.Tensor:
        """Memory for a block, which is used again when that has ended."""
        if not self._ring or self._ring[0].device.type != device:
            pinned = device == "cpu" and torch.cuda.is_available()
            self._ring = [
                torch.empty(BLOCK_BYTES[backend], dtype=torch.uint8, device=device, pin_memory=pinned)
                for _ in range(IN_FLIGHT[backend] + 1)
            ]
        return self._ring[number % len(self._ring)]


def _copy(memory: torch.Tensor, packed: torch.Tensor, moves: list[tuple[int, int, int, int]], *, pack: bool) -> None:
    at = 0
    for offset, pitch, width, rows in moves:
        here = torch.as_strided(memory, (rows, width), (pitch, 1), memory.storage_offset() + offset)
        there = packed[at : at + rows * width].view(rows, width)
        _ = there.copy_(here) if pack else here.copy_(there)
        at += rows * width
