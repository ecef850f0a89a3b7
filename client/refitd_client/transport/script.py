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
from typing import Literal

import msgspec

from refitd_client.transport.offer import side_by_side
from refitd_client.transport.schedule import Block, HeldStrip, Needs, Schedule, Strip, StripMove, strip

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


def why_none(said: Mapping[str, Ready | None]) -> str:
    """Why no receiver takes part, in a sentence."""
    refused = next((each.refused for each in said.values() if each is not None and each.refused), None)
    return refused or "no receiver was ready in time"


def why_absent(said: Ready | None) -> str:
    """Why a receiver that was invited has no part."""
    if said is None:
        return "it was not ready in time"
    return said.refused or "it was left out"


def key(transfer: str, word: str, receiver: str = "") -> str:
    """The key of a word in the sender's store."""
    return f"{transfer}/{word}/{receiver}"


MOST_LANES = 2**16  # of one group: the groups of lanes have numbers of their own


class LaneWord(msgspec.Struct, frozen=True, array_like=True):
    """A lane: its number in the schedule, and its members in the order of their ranks. The first is the sender."""

    number: int
    members: tuple[str, ...]


class BlockWord(msgspec.Struct, frozen=True, array_like=True):
    """A block: the number of its lane among the script's, and this member's side of the moves.

    `rows` has four numbers for each move: the offset in the member's memory, the bytes from row to row, the bytes of a
    row, and the rows.
    """

    lane: int
    rows: tuple[int, ...]

    @property
    def moves(self) -> list[tuple[int, int, int, int]]:
        each = iter(self.rows)
        return list(zip(each, each, each, each, strict=True))

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
            if not 0 <= block.lane < len(self.lanes) or not block.rows or len(block.rows) % 4:
                return "a block of it is in no lane, or has no moves"
            for offset, pitch, width, rows in block.moves:
                if min(offset, width - 1, rows - 1) < 0 or (rows > 1 and pitch < width):
                    return "a move of it has no bytes, or bytes twice"
                if offset + (rows - 1) * pitch + width > room:
                    return f"it goes beyond the {room} bytes of this member"
        return None


class ShardTable(msgspec.Struct, frozen=True, kw_only=True):
    """What the first sender plans from. `sizes` are the tensors' in bytes; `held` has six numbers for each strip that
    a sender sends (`HeldStrip`: tensor, begin, width, rows, pitch, place); `needs` has five for each strip that a
    receiver needs (tensor, begin, width, rows, pitch). A receiver that is not there needs everything.
    """

    sizes: tuple[int, ...]
    held: tuple[tuple[int, ...], ...]
    needs: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict[str, tuple[int, ...]])

    def strips(self) -> list[list[HeldStrip]]:
        found: list[list[HeldStrip]] = []
        for sender in self.held:
            each = iter(sender)
            fields = zip(each, each, each, each, each, each, strict=True)
            found.append([HeldStrip(tensor, Strip(*numbers), at) for tensor, *numbers, at in fields])
        return found

    def needed(self, receiver: str) -> Needs | None:
        """What a receiver needs; None for everything."""
        if (numbers := self.needs.get(receiver)) is None:
            return None
        found: dict[int, list[Strip]] = {}
        each = iter(numbers)
        for tensor, *fields in zip(each, each, each, each, each, strict=True):
            found.setdefault(tensor, []).append(Strip(*fields))
        return found


def table_of_whole(sizes: Sequence[int]) -> ShardTable:
    """That of one sender, whose memory has all tensors of these sizes side by side."""
    pairs = enumerate(zip(side_by_side(sizes)[0], sizes, strict=True))
    held = [HeldStrip(number, strip(0, size), at) for number, (at, size) in pairs if size]
    return ShardTable(sizes=tuple(sizes), held=(held_numbers(held),))


def held_numbers(strips: Sequence[HeldStrip]) -> tuple[int, ...]:
    """Strips that one sender sends, as a table has them."""
    return tuple(number for tensor, each, at in strips for number in (tensor, *each, at))


def needs_numbers(needs: Needs) -> tuple[int, ...]:
    """What one receiver needs, as a table has it."""
    return tuple(number for tensor, strips in sorted(needs.items()) for each in strips for number in (tensor, *each))


def sender_name(number: int) -> str:
    """A sender's name in the store. No socket of an engine rank has such a name."""
    return f"sender {number}"


def script_of(plan: Schedule, member: str) -> MemberScript:
    """The part of one sender or receiver."""
    lanes = [
        LaneWord(number, (sender_name(lane.sender), *lane.receivers))
        for number, lane in enumerate(plan.lanes)
        if member == sender_name(lane.sender) or member in lane.receivers
    ]
    mine = {lane.number: place for place, lane in enumerate(lanes)}
    sends = any(lane.members[0] == member for lane in lanes)
    blocks = tuple(
        BlockWord(mine[block.lane], _side(block, sends=sends)) for block in plan.blocks if block.lane in mine
    )
    return MemberScript(lanes=tuple(lanes), blocks=blocks)


def _side(block: Block, *, sends: bool) -> tuple[int, ...]:
    def numbers(move: StripMove) -> tuple[int, int, int, int]:
        return (
            move.source if sends else move.target,
            move.source_pitch if sends else move.target_pitch,
            move.width,
            move.rows,
        )

    return tuple(number for move in block.moves for number in numbers(move))


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
        return Go(refused=why_none(receivers))
    said = [*(each for each in senders.values() if each is not None), *ready.values()]
    wanted = (tuple(ready), table, backend)
    same = standing is not None and (standing.receivers, standing.table, standing.backend) == wanted
    if standing is not None and same and {each.group for each in said} <= {standing.number}:
        return Go(group=standing.number, receivers=tuple(ready))
    most = min(MOST_STREAMS // (len(senders) + 1), _MOST_CONNECTIONS // len(ready), *(each.streams for each in said))
    return Go(group=numbered + 1, receivers=tuple(ready), streams=max(most, 1))
