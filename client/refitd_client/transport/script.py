"""What the members of a transfer say to each other, and what each of them does: its part of the schedule. Pure.

    ready   each receiver, and each sender but the first, writes into the first sender's store which group it is a
            member of, or why it cannot take part
    go      the first sender writes who takes part, and in which group; or why nothing is sent. It plans, and writes
            each member's script into the store
    blocks  senders broadcast blocks of bytes in the order of the schedule
    done    each receiver writes what it has: all tensors with the offer's fingerprints, or what is wrong

Lanes and scripts stay as long as members, shards and needs do, since making them takes longer than sending: they have
the number of the group that `Go` names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

from refitd_client.transport.offer import side_by_side
from refitd_client.transport.schedule import HeldStrip, Schedule, Strip, StripMove, strip

Backend = Literal["gloo", "nccl"]
BLOCK_BYTES: Mapping[Backend, int] = {"gloo": 32 * 2**20, "nccl": 256 * 2**20}
"""The size of a block: large enough that its fixed cost does not count, small enough that a few fit anywhere."""
IN_FLIGHT: Mapping[Backend, int] = {"gloo": 4, "nccl": 3}
"""Blocks that are under way at the same time: over Gloo one on each connection, while the next ones are filled."""
SENDER = 0
"""The sender's rank in each lane."""
MOST_STREAMS = 4
"""TCP connections between two members of a Gloo group. One is bound by a core on each side, which copies its bytes."""
_MOST_CONNECTIONS = 64
"""Of one member: each connects to all others, so that a large group has fewer between two of them."""


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """A member's word before the transfer. `group` is the number of its lanes, 0 for none. `streams` is how many
    connections to each other member it makes at most; those of older releases make one.
    """

    group: int = 0
    refused: str = ""
    streams: int = 1


class Go(msgspec.Struct, frozen=True, kw_only=True):
    """The first sender's word: the receivers that take part, and the number of the lanes, whose members have `streams`
    connections between any two.
    """

    group: int = 0
    receivers: tuple[str, ...] = ()
    refused: str = ""
    streams: int = 1


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """A receiver's word after the transfer. `refused` says why it has nothing, "" where it has all."""

    refused: str = ""


def why_absent(said: Ready | None) -> str:
    """Why a receiver that was invited has no part."""
    if said is None:
        return "it was not ready in time"
    return said.refused or "it was left out"


def key(transfer: str, word: str, receiver: str = "") -> str:
    return f"{transfer}/{word}/{receiver}"


MOST_LANES = 2**16  # of one group: the groups of lanes have numbers of their own


class LaneWord(msgspec.Struct, frozen=True, array_like=True):
    """A lane: its number in the schedule, and its members in the order of their ranks. The first is the sender."""

    number: int
    members: tuple[str, ...]


class StripSide(NamedTuple):
    """One member's side of a move: the offset in its memory, bytes from row to row, bytes of a row, and the rows."""

    offset: int
    pitch: int
    width: int
    rows: int


class BlockWord(msgspec.Struct, frozen=True, array_like=True):
    """A block: the number of its lane among the script's, and this member's side of the moves."""

    lane: int
    moves: tuple[StripSide, ...]

    @property
    def nbytes(self) -> int:
        return sum(width * rows for _, _, width, rows in self.moves)


class MemberScript(msgspec.Struct, frozen=True):
    """All that one member does, in this order."""

    lanes: tuple[LaneWord, ...] = ()
    blocks: tuple[BlockWord, ...] = ()

    @property
    def delivered(self) -> int:
        """How many bytes a sender brings to receivers: what several of them get counts for each."""
        return sum(block.nbytes * (len(self.lanes[block.lane].members) - 1) for block in self.blocks)

    def fault(self, room: int) -> str | None:
        """Why it cannot be followed in a memory of `room` bytes; None where it can."""
        for block in self.blocks:
            if not 0 <= block.lane < len(self.lanes) or not block.moves:
                return "a block of it is in no lane, or has no moves"
            for offset, pitch, width, rows in block.moves:
                if min(offset, width - 1, rows - 1) < 0 or (rows > 1 and pitch < width):
                    return "a move of it has no bytes, or bytes twice"
                if offset + (rows - 1) * pitch + width > room:
                    return f"it goes beyond the {room} bytes of this member"
        return None


class ShardTable(msgspec.Struct, frozen=True, kw_only=True):
    """What the first sender plans from. `sizes` are the tensors' in bytes; `held` are the strips that each sender
    sends; `needs` are the strips that each receiver needs, by the tensors' numbers. A receiver that is not there needs
    everything.
    """

    sizes: tuple[int, ...]
    held: tuple[tuple[HeldStrip, ...], ...]
    needs: dict[str, dict[int, tuple[Strip, ...]]] = {}


def table_of_whole(sizes: Sequence[int]) -> ShardTable:
    """That of one sender, whose memory has all tensors of these sizes side by side."""
    pairs = enumerate(zip(side_by_side(sizes)[0], sizes, strict=True))
    held = tuple(HeldStrip(number, strip(0, size), at) for number, (at, size) in pairs if size)
    return ShardTable(sizes=tuple(sizes), held=(held,))


def sender_name(number: int) -> str:
    """A sender's name in the store. No socket of an engine rank has such a name."""
    return f"sender {number}"


def script_of(plan: Schedule, member: str) -> MemberScript:
    lanes = [
        LaneWord(number, (sender_name(lane.sender), *lane.receivers))
        for number, lane in enumerate(plan.lanes)
        if member == sender_name(lane.sender) or member in lane.receivers
    ]
    mine = {lane.number: place for place, lane in enumerate(lanes)}
    sends = any(lane.members[0] == member for lane in lanes)
    blocks = tuple(
        BlockWord(mine[block.lane], tuple(_side(move, sends=sends) for move in block.moves))
        for block in plan.blocks
        if block.lane in mine
    )
    return MemberScript(lanes=tuple(lanes), blocks=blocks)


def _side(move: StripMove, *, sends: bool) -> StripSide:
    if sends:
        return StripSide(move.source, move.source_pitch, move.width, move.rows)
    return StripSide(move.target, move.target_pitch, move.width, move.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingLanes:
    """The lanes that were made: their number, the receivers in them, the table that they were planned from, and the
    backend of their groups.
    """

    number: int
    receivers: tuple[str, ...]
    table: ShardTable
    backend: Backend


def decide_lanes(
    senders: Mapping[str, Ready | None],
    receivers: Mapping[str, Ready | None],
    standing: StandingLanes | None,
    table: ShardTable,
    backend: Backend,
    numbered: int,
) -> Go:
    """Decide who takes part, and whether the lanes are made anew.

    Args:
        senders: what each sender but the first has said; None for one that has said nothing in time.
        standing: the lanes of the transfer before, None where there are none or one has failed.
        numbered: the number of the last lanes that were made.
    """
    for name, said in senders.items():
        if said is None or said.refused:  # without its part no receiver would have a whole version
            return Go(refused=f"{name} was not ready in time" if said is None else f"{name}: {said.refused}")
    ready = {name: each for name, each in sorted(receivers.items()) if each is not None and not each.refused}
    if not ready:
        refused = next((each.refused for each in receivers.values() if each is not None), "")
        return Go(refused=refused or "no receiver was ready in time")
    said = [*(each for each in senders.values() if each is not None), *ready.values()]
    wanted = (tuple(ready), table, backend)
    same = standing is not None and (standing.receivers, standing.table, standing.backend) == wanted
    if standing is not None and same and {each.group for each in said} <= {standing.number}:
        return Go(group=standing.number, receivers=tuple(ready))
    most = min(MOST_STREAMS // (len(senders) + 1), _MOST_CONNECTIONS // len(ready), *(each.streams for each in said))
    return Go(group=numbered + 1, receivers=tuple(ready), streams=max(most, 1))
