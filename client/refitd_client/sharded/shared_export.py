"""Rank 0's part in a hand-over or a transfer: all ranks lend their shards, and one offer has what their scans add up
to.

To engines on their host the offer says where the shards lie. It names the locks of all ranks: an engine counts what it
copied while each rank lived and was still in the publication. Else each rank's process sends what the rank lends.

Ranks answer each order at once, except for the lending, and change nothing until rank 0 gives them another order. The
transfer goes on in their processes meanwhile. So rank 0 asks the service for the engines' answers in between, and a
rank that dies is found by the next order.
"""

import logging
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from refitd_client.checkpoint.header import Entry
from refitd_client.errors import RankLostError
from refitd_client.fingerprint import Scan
from refitd_client.fingerprint.host import MASK
from refitd_client.sharded.layout import AgreedLayout
from refitd_client.sharded.orders import (
    DoneReply,
    EndOrder,
    FailedReply,
    LentPart,
    LentReply,
    RankOrder,
    RankReply,
    SendOrder,
    SentReply,
)
from refitd_client.sharded.parts import entries_of, held_strips, sent_parts
from refitd_client.sharded.rank_group import error_of_rank
from refitd_client.transport.child import TransferSent
from refitd_client.transport.memory import boot_id, host_name, process_life
from refitd_client.transport.needs import NeedsRefusedError, RankNeeds, numbered, read_needs
from refitd_client.transport.offer import (
    FORMAT_OF_RANKS,
    NOWHERE,
    DevicePlace,
    GroupTransfer,
    HostPlace,
    Offer,
    OfferedPart,
    OfferedTensor,
    OfferLayout,
    offer_with,
)
from refitd_client.transport.script import ShardTable, held_numbers, needs_numbers
from refitd_client.transport.sending import Destination, NoTransferError

if TYPE_CHECKING:
    from refitd_client.sharded.shared_shards import SharedShards

ReplyT = TypeVar("ReplyT", bound=RankReply)
_log = logging.getLogger("refitd_client")


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

    def offer(self, agreed: AgreedLayout, replies: Sequence[LentReply]) -> tuple[OfferLayout, bytes]:
        """The layout of an offer of what was taken, and the same as JSON."""
        made = self._made
        if made is None or made[0] is not agreed or made[1] != self._lent:
            layout = offered_layout(agreed, [lent.places for lent in self._lent], [lent.lock for lent in self._lent])
            layout = msgspec.structs.replace(layout, host=replies[0].host, boot=replies[0].boot)
            made = self._made = agreed, self._lent, layout, msgspec.json.encode(layout)
        return made[2:]


def offered_layout(agreed: AgreedLayout, places: Sequence[Sequence[LentPart]], locks: Sequence[str]) -> OfferLayout:
    """An offer's layout, without the host. Pure.

    Args:
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


class SharedExport:
    """The shards of all ranks (`transport.handover.Exported`): sent to a destination, or lent where they lie."""

    def __init__(self, shards: "SharedShards", destination: Destination | None) -> None:
        self._shards, self._destination, self._lent = shards, destination, shards.lent
        self._replies: list[LentReply] = []
        self._transfer: GroupTransfer | None = None
        self._needs: dict[str, tuple[str, RankNeeds]] = {}
        self._slices: dict[str, bytes] = {}

    def scan(self) -> Mapping[str, Scan]:
        """Have every rank scan what it lends. Returns what the scans add up to.

        Raises:
            NoTransferError: a rank cannot lend what it has, or they cannot lend it together.
            RankLostError: a rank is gone.
        """
        shards, entries = self._shards, entries_of(self._shards.agreed.layout)
        if self._destination is not None:
            self._needs = needs_of(shards.root, self._destination, entries)
        partial = {digest: needs.partial() for digest, needs in self._needs.values()}
        known = self._lent.number if self._destination is None else None
        replies = self._replies = self._all(shards.lend_orders(known, partial), "lend its part", LentReply)
        shards.are_told(partial)
        if self._destination is None:
            self._lent.take(replies)
        for digest, some in partial.items():
            sums = (sum(each.slices[digest].get(name, 0) for each in replies) & MASK for name in some)
            self._slices[digest] = struct.pack(f"<{len(some)}Q", *sums)
        found = {entry.name: (0, 0) for entry in entries}
        for reply in replies:
            for name, (fingerprint, bad) in reply.scans.items():
                before = found[name]
                found[name] = (before[0] + fingerprint) & MASK, before[1] + bad
        return {name: Scan(*each) for name, each in found.items()}

    def offer(self, version: str, fingerprints: Sequence[int]) -> Offer:
        """An offer of what was scanned. Tensors that are sent lie nowhere whole.

        Raises:
            NoTransferError: rank 0's sender cannot be begun.
        """
        agreed = self._shards.agreed
        if self._destination is None:
            layout, line = self._lent.offer(agreed, self._replies)
            return offer_with(layout, version, fingerprints, line)
        opened = self._shards.export.open(self._destination, self._shards.rank_group.size)
        digests = {name: digest for name, (digest, _) in self._needs.items()}
        self._transfer = msgspec.structs.replace(opened, needs=digests, slices=self._slices)
        tensors = tuple(OfferedTensor(each.name, each.dtype, each.shape, NOWHERE) for each in entries_of(agreed.layout))
        layout = OfferLayout(host=host_name(), boot=boot_id(), pid=os.getpid(), life="", tensors=tensors)
        return replace(offer_with(layout, version, fingerprints), transfer=self._transfer)

    def send(self) -> "ShardsUnderWay | None":
        """Have every rank begin to send. A rank that cannot ends the transfer, and so does one that is gone."""
        if self._transfer is None:
            return None
        table = table_of(self._shards.agreed, {name: needs for name, (_, needs) in self._needs.items()})
        orders: list[RankOrder] = [SendOrder(transfer=self._transfer)] * self._shards.rank_group.size
        orders[0] = SendOrder(transfer=self._transfer, table=table)
        under_way = ShardsUnderWay(self._shards)
        try:
            self._all(orders, "begin to send", DoneReply)
        except (NoTransferError, RankLostError) as error:
            under_way.failed.append(f"{error}")
            self._shards.export.stop()  # it would wait for the rank that does not come
        return under_way

    def _all(self, orders: Sequence[RankOrder], doing: str, kind: type[ReplyT]) -> list[ReplyT]:
        """The replies of all ranks.

        Raises:
            NoTransferError: one has failed. RankLostError: one is gone.
        """
        found: list[ReplyT] = []
        for rank, reply in enumerate(self._shards.ask(orders, doing)):
            if isinstance(reply, FailedReply):
                raise NoTransferError(str(error_of_rank(rank, reply.error)))
            if not isinstance(reply, kind):
                raise NoTransferError(f"rank {rank} says {type(reply).__name__}: do all ranks run one refitd?")
            found.append(reply)
        return found


@dataclass(slots=True)
class ShardsUnderWay:
    """A transfer that all ranks have begun (`transport.handover.UnderWay`)."""

    shards: "SharedShards"
    failed: list[str] = field(default_factory=list[str])

    def is_sent(self) -> bool:
        """Not before the engines have answered: ranks stage the files' bytes when all have ended the transfer."""
        return False

    def answered(self) -> None:
        """See `UnderWay`: it does not wait."""

    def finish(self) -> TransferSent | NoTransferError:
        """What has come of it on all ranks. The memory that they sent from is theirs again."""
        orders: list[RankOrder] = [EndOrder()] * self.shards.rank_group.size
        try:
            replies = self.shards.ask(orders, "end its transfer")
        except RankLostError as error:  # the files will say so as well
            return NoTransferError("; ".join([*self.failed, str(error)]))
        sent = [reply.sent for reply in replies if isinstance(reply, SentReply) and reply.sent is not None]
        refused = [*self.failed, *_refusals(replies)]
        if refused or not sent:
            return NoTransferError("; ".join(dict.fromkeys(refused))[:1000])
        return TransferSent(refused=sent[0].refused, ms=sent[0].ms, nbytes=sum(each.nbytes for each in sent))


def needs_of(root: Path, to: Destination, entries: Sequence[Entry]) -> dict[str, tuple[str, RankNeeds]]:
    """What receivers need that do not need everything, by name, with the digest. A file that says nothing of use, or of
    another version's tensors, is left aside: that receiver gets everything.
    """
    sizes = {entry.name: entry.nbytes for entry in entries}
    found, read = dict[str, tuple[str, RankNeeds]](), dict[str, RankNeeds]()
    for name, digest in to.needs.items():
        if name not in to.receivers:
            continue
        try:
            needs = read[digest] if digest in read else read_needs(root, name, digest)
        except (NeedsRefusedError, OSError) as error:
            _log.info("%s gets whole tensors: %s", name, error)
            continue
        read[digest] = needs
        if needs.fits(sizes):
            found[name] = digest, needs
    return found


def table_of(agreed: AgreedLayout, needs: Mapping[str, RankNeeds]) -> ShardTable:
    """What rank 0's sender plans from: what each rank sends of the agreed layout, and what receivers need."""
    entries = entries_of(agreed.layout)
    numbers = {entry.name: number for number, entry in enumerate(entries)}
    held = (
        held_numbers(held_strips(sent_parts(parts, claims)[0], numbers))
        for parts, claims in zip(agreed.layout.parts, agreed.claims, strict=True)
    )
    names = [entry.name for entry in entries]
    return ShardTable(
        sizes=tuple(entry.nbytes for entry in entries),
        held=tuple(held),
        needs={receiver: needs_numbers(numbered(each, names)) for receiver, each in needs.items()},
    )


def _refusals(replies: Sequence[RankReply]) -> list[str]:
    """Why ranks have sent nothing, the first sender's reason first: the others mostly say that it has ended."""
    found: list[str] = []
    for rank, reply in enumerate(replies):
        match reply:
            case SentReply(refused=refused) if refused:
                found.append(f"rank {rank}: {refused}")
            case FailedReply(error=error):
                found.append(f"rank {rank}: {error}")
            case _:
                continue
    return found
