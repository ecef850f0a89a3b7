"""Rank 0's part in a hand-over: all ranks lend their shards, and one offer says where they lie (`transport.exported`).

Ranks change nothing until rank 0 gives them another order, which it does when the offer is withdrawn. The offer names
the locks of all of them: an engine counts what it copied while each rank lived and was still in the publication.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from refitd_client.fingerprint import Scan
from refitd_client.fingerprint.host import MASK
from refitd_client.sharded.lend_orders import LentPart, LentReply
from refitd_client.sharded.parts import entries_of
from refitd_client.sharded.rank_errors import error_of_rank
from refitd_client.sharded.rank_group import FailedReply, RankReply
from refitd_client.transport.group.sending import NoTransferError
from refitd_client.transport.ipc.exported_memory import process_life
from refitd_client.transport.ipc.offer import (
    FORMAT_OF_RANKS,
    NOWHERE,
    DevicePlace,
    HostPlace,
    Offer,
    OfferedPart,
    OfferedTensor,
    OfferLayout,
    offer_with,
)

if TYPE_CHECKING:
    from refitd_client.sharded.agreement import AgreedLayout
    from refitd_client.sharded.shared_shards import SharedShards
    from refitd_client.transport.exported import UnderWay


@dataclass(frozen=True, slots=True)
class _Lent:
    """What one rank lends: the number of its places, and the name of its lock."""

    number: int
    places: tuple[LentPart, ...]
    lock: str


class LentLayout:
    """Where all ranks' shards lie, from one hand-over to the next: made anew where one rank's have moved."""

    def __init__(self) -> None:
        self._lent: list[_Lent] = []
        self._made: tuple[AgreedLayout, list[_Lent], OfferLayout, bytes] | None = None

    def number(self, rank: int) -> int:
        """That of the places that are known of a rank, 0 for none."""
        return self._lent[rank].number if rank < len(self._lent) else 0

    def take(self, replies: Sequence[LentReply]) -> None:
        """Take what all ranks say, by rank.

        Raises:
            NoTransferError: they lend nothing that can be in one offer.
        """
        known, self._lent = self._lent, []
        first = replies[0]
        for rank, reply in enumerate(replies):
            if (reply.host, reply.boot) != (first.host, first.boot):
                raise NoTransferError(f"rank 0 is on {first.host}, and rank {rank} on {reply.host}: use nccl or gloo")
        for rank, reply in enumerate(replies):
            places = known[rank].places if reply.places is None and rank < len(known) else reply.places
            self._lent.append(_Lent(reply.number, places or (), reply.lock))
        if len({type(part.place) for lent in self._lent for part in lent.places}) > 1:
            raise NoTransferError("some of the tensors are on GPUs, and some in host memory")

    def offer(self, agreed: "AgreedLayout", replies: Sequence[LentReply]) -> tuple[OfferLayout, bytes]:
        """The layout of an offer of what was taken, and the same as JSON."""
        made = self._made
        if made is None or made[0] is not agreed or made[1] != self._lent:
            layout = offered_layout(agreed, [lent.places for lent in self._lent], [lent.lock for lent in self._lent])
            layout = msgspec.structs.replace(layout, host=replies[0].host, boot=replies[0].boot)
            made = self._made = agreed, self._lent, layout, msgspec.json.encode(layout)
        return made[2:]


def offered_layout(agreed: "AgreedLayout", places: Sequence[Sequence[LentPart]], locks: Sequence[str]) -> OfferLayout:
    """An offer's layout, without the host. Pure.

    Args:
        agreed: the version's tensors.
        places: what each rank lends, by rank.
        locks: the names of their locks, by rank; "" for rank 0.
    """
    parts: dict[str, list[OfferedPart]] = {}
    for part in (part for lent in places for part in lent):
        at = part.place.offset
        for strip in part.strips:
            parts.setdefault(part.name, []).append(OfferedPart(*strip, _moved(part.place, at)))
            at += strip.nbytes
    tensors = tuple(
        OfferedTensor(
            entry.name,
            entry.dtype,
            entry.shape,
            NOWHERE,
            tuple(sorted(parts.get(entry.name, ()), key=lambda part: part.begin)),
        )
        for entry in entries_of(agreed.layout)
    )
    return OfferLayout(
        host="",
        boot="",
        pid=os.getpid(),
        life=process_life(),
        tensors=tensors,
        format=FORMAT_OF_RANKS,
        lenders=tuple(lock for lock in locks if lock),
    )


def _moved(place: HostPlace | DevicePlace, offset: int) -> HostPlace | DevicePlace:
    return msgspec.structs.replace(place, offset=offset)


class LentShards:
    """The shards of all ranks, lent where they lie (`transport.exported.Exported`)."""

    def __init__(self, shards: "SharedShards", lent: LentLayout) -> None:
        self._shards, self._lent = shards, lent
        self._replies: list[LentReply] = []

    def scan(self) -> Mapping[str, Scan]:
        """Have every rank scan what it lends. Returns what the scans add up to.

        Raises:
            NoTransferError: a rank cannot lend what it has, or they cannot lend it together.
            RankLostError: a rank is gone.
        """
        shards = self._shards
        replies = _lent(shards.ask(shards.lend_orders(self._lent.number), "lend its part"))
        shards.are_told({})
        self._lent.take(replies)
        self._replies = replies
        found = {entry.name: (0, 0) for entry in entries_of(shards.agreed.layout)}
        for reply in replies:
            for name, (fingerprint, bad) in reply.scans.items():
                before = found[name]
                found[name] = (before[0] + fingerprint) & MASK, before[1] + bad
        return {name: Scan(*each) for name, each in found.items()}

    def offer(self, version: str, fingerprints: Sequence[int]) -> Offer:
        layout, line = self._lent.offer(self._shards.agreed, self._replies)
        return offer_with(layout, version, fingerprints, line)

    def send(self, root: Path, offer: str) -> "UnderWay | None":
        """As `Exported`: engines open the memory themselves."""
        return None


def _lent(replies: Sequence[RankReply]) -> list[LentReply]:
    found: list[LentReply] = []
    for rank, reply in enumerate(replies):
        match reply:
            case LentReply():
                found.append(reply)
            case FailedReply(error=error):
                raise NoTransferError(str(error_of_rank(rank, error)))
            case other:
                raise NoTransferError(f"rank {rank} says {type(other).__name__}: do all ranks run one refitd?")
    return found
