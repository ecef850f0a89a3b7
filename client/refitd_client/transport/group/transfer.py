"""What the sender and the receivers of a transfer decide, each by itself and all alike. Pure.

    ready   each receiver writes into the sender's store which group it is a member of, or why it cannot receive
    go      the sender writes which group sends, with its members; or why nothing is sent
    blocks  the sender broadcasts the bytes of all tensors, block after block, in the order of the offer
    done    each receiver writes what it has: all tensors with the offer's fingerprints, or what is wrong

A group stays as long as all its members do, since making one takes longer than sending. When a member is another one,
or has another group or none, the sender numbers a new group, and all that are ready join that.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from refitd_client.transport.ipc.offer import OfferedTensor, side_by_side

Backend = Literal["gloo", "nccl"]
BLOCK_BYTES: Mapping[Backend, int] = {"gloo": 32 * 2**20, "nccl": 256 * 2**20}
"""The size of a block: large enough that its fixed cost does not count, small enough that a few fit anywhere."""
IN_FLIGHT: Mapping[Backend, int] = {"gloo": 4, "nccl": 3}
"""Blocks that are under way at the same time: over Gloo one on each connection, while the next ones are filled."""
SENDER = 0
"""The sender's rank in each group."""
MOST_STREAMS = 4
"""TCP connections between two members of a Gloo group. One is bound by a core on each side, which copies its bytes."""
_MOST_CONNECTIONS = 64
"""Of one member: each connects to all others, so that a large group has fewer between two of them."""


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """A receiver's word before the transfer. `group` is the number of its group, 0 for none. `streams` is how many
    connections to each other member it makes at most; those of older releases make one.
    """

    group: int = 0
    refused: str = ""
    streams: int = 1


class Go(msgspec.Struct, frozen=True, kw_only=True):
    """The sender's word. `ranks` are the receivers that take part, by name, with their ranks in group `group`, whose
    members have `streams` connections between any two.
    """

    group: int = 0
    ranks: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    refused: str = ""
    streams: int = 1


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """A receiver's word after the transfer. `refused` says why it has nothing, "" where it has all."""

    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingGroup:
    """A group that was made: its number, and its receivers' ranks."""

    number: int
    ranks: Mapping[str, int]


def decide(said: Mapping[str, Ready | None], standing: StandingGroup | None, numbered: int) -> Go:
    """Decide which group sends.

    Args:
        said: what each receiver that was invited has said; None for one that has said nothing in time.
        standing: the group of the transfer before, None where there is none or it has failed.
        numbered: the number of the last group that was made.
    """
    ready = {name: each for name, each in sorted(said.items()) if each is not None and not each.refused}
    if not ready:
        return Go(refused=why_none(said))
    if standing is not None and [*ready] == sorted(standing.ranks):
        held = {each.group for each in ready.values()}
        if held == {standing.number}:
            return Go(group=standing.number, ranks=dict(standing.ranks))
    most = min(MOST_STREAMS, _MOST_CONNECTIONS // len(ready), *(each.streams for each in ready.values()))
    ranks = {name: rank for rank, name in enumerate(ready, SENDER + 1)}
    return Go(group=numbered + 1, ranks=ranks, streams=max(most, 1))


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


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of one tensor: from its byte `begin` on, `size` of them, at `offset` of the block."""

    tensor: int
    begin: int
    size: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatLayout:
    """All tensors in one piece of memory: their offsets in bytes, in the offer's order, and the bytes of all."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    nbytes: int

    def blocks(self, block: int) -> list[tuple[int, int]]:
        """Where each block begins and ends. `block` is the most bytes of one."""
        return [(begin, min(begin + block, self.nbytes)) for begin in range(0, self.nbytes, block)]

    def pieces(self, begin: int, end: int) -> Iterable[Piece]:
        """The parts of tensors that lie in a block."""
        for number in range(max(bisect_right(self.offsets, begin) - 1, 0), bisect_left(self.offsets, end)):
            offset, size = self.offsets[number], self.sizes[number]
            first, last = max(begin, offset), min(end, offset + size)
            if first < last:
                yield Piece(number, first - offset, last - first, first - begin)


def flat_layout(tensors: Sequence[OfferedTensor]) -> FlatLayout:
    """The layout that sender and receivers give to the tensors of an offer."""
    sizes = tuple(tensor.nbytes for tensor in tensors)
    offsets, nbytes = side_by_side(sizes)
    return FlatLayout(offsets=tuple(offsets), sizes=sizes, nbytes=nbytes)
