"""Rank 0's part in a transfer: all ranks stage, the offer has what their scans add up to, all send, and all end.

Ranks answer each order at once, except for the staging: the transfer goes on in their processes meanwhile. So rank 0
asks the service for the engines' answers in between, and a rank that dies is found by the next order.
"""

import logging
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from refitd_client.checkpoint.header import Entry
from refitd_client.errors import RankLostError
from refitd_client.fingerprint import Scan
from refitd_client.fingerprint.host import MASK
from refitd_client.sharded.parts import entries_of, held_strips, sent_parts
from refitd_client.sharded.rank_errors import error_of_rank
from refitd_client.sharded.rank_group import (
    EndOrder,
    FailedReply,
    RankOrder,
    RankReply,
    SendOrder,
    SentReply,
    StagedReply,
)
from refitd_client.transport.group.child import TransferSent
from refitd_client.transport.group.sending import Destination, NoTransferError
from refitd_client.transport.ipc.offer import (
    NOWHERE,
    GroupTransfer,
    Offer,
    OfferedTensor,
    OfferLayout,
    offer_with,
)
from refitd_client.transport.ipc.shared import boot_id, host_name
from refitd_client.transport.shards.needs import NeedsRefusedError, RankNeeds, numbered, read_needs
from refitd_client.transport.shards.script import ShardTable, held_numbers, needs_numbers

if TYPE_CHECKING:
    from pathlib import Path

    from refitd_client.sharded.agreement import AgreedLayout
    from refitd_client.sharded.shared_shards import SharedShards

_log = logging.getLogger("refitd_client")


class ShardsOnTheirWay:
    """The shards of all ranks, on their way to the receivers (`transport.exported.Exported`)."""

    def __init__(self, shards: "SharedShards", destination: Destination) -> None:
        self._shards, self._destination = shards, destination
        self._transfer: GroupTransfer | None = None
        self._needs: dict[str, tuple[str, RankNeeds]] = {}
        self._slices: dict[str, bytes] = {}

    def scan(self) -> Mapping[str, Scan]:
        """Have every rank stage what it sends. Returns what the scans add up to.

        Raises:
            NoTransferError: a rank could not.
            RankLostError: a rank is gone.
        """
        shards = self._shards
        self._needs = needs_of(shards.root, self._destination, entries_of(shards.agreed.layout))
        partial = {digest: needs.partial() for digest, needs in self._needs.values()}
        replies = self._all(shards.stage_orders(partial), "stage its part")
        shards.are_told(partial)
        staged = [reply for reply in replies if isinstance(reply, StagedReply)]
        for digest, some in partial.items():
            sums = (sum(each.slices[digest].get(name, 0) for each in staged) & MASK for name in some)
            self._slices[digest] = struct.pack(f"<{len(some)}Q", *sums)
        found = {entry.name: (0, 0) for entry in entries_of(shards.agreed.layout)}
        for reply in staged:
            for name, (fingerprint, bad) in reply.scans.items():
                before = found[name]
                found[name] = (before[0] + fingerprint) & MASK, before[1] + bad
        return {name: Scan(*each) for name, each in found.items()}

    def offer(self, version: str, fingerprints: Sequence[int]) -> Offer:
        """An offer of tensors that lie nowhere whole: they are only sent.

        Raises:
            NoTransferError: rank 0's sender cannot be begun.
        """
        tensors = tuple(
            OfferedTensor(entry.name, entry.dtype, entry.shape, NOWHERE)
            for entry in entries_of(self._shards.agreed.layout)
        )
        layout = OfferLayout(host=host_name(), boot=boot_id(), pid=os.getpid(), life="", tensors=tensors)
        opened = self._shards.sender.open(self._destination, self._shards.rank_group.size)
        digests = {name: digest for name, (digest, _) in self._needs.items()}
        self._transfer = msgspec.structs.replace(opened, needs=digests, slices=self._slices)
        offer = offer_with(layout, version, fingerprints)
        return Offer(
            version=offer.version,
            layout=layout,
            fingerprints=offer.fingerprints,
            line=offer.line,
            transfer=self._transfer,
        )

    def send(self, root: "Path", offer: str) -> "ShardsUnderWay | None":
        """Have every rank begin to send. A rank that cannot ends the transfer, and so does one that is gone."""
        if self._transfer is None:
            return None
        table = table_of(self._shards.agreed, {name: needs for name, (_, needs) in self._needs.items()})
        orders: list[RankOrder] = [SendOrder(transfer=self._transfer)] * self._shards.rank_group.size
        orders[0] = SendOrder(transfer=self._transfer, table=table)
        under_way = ShardsUnderWay(self._shards)
        try:
            self._all(orders, "begin to send")
        except (NoTransferError, RankLostError) as error:
            under_way.failed.append(f"{error}")
            self._shards.sender.stop()  # it would wait for the rank that does not come
        return under_way

    def _all(self, orders: Sequence[RankOrder], doing: str) -> list[RankReply]:
        """The replies of all ranks.

        Raises:
            NoTransferError: one has failed. RankLostError: one is gone.
        """
        replies = self._shards.ask(orders, doing)
        for rank, reply in enumerate(replies):
            if isinstance(reply, FailedReply):
                raise NoTransferError(str(error_of_rank(rank, reply.error)))
        return replies


@dataclass(slots=True)
class ShardsUnderWay:
    """A transfer that all ranks have begun (`transport.exported.UnderWay`)."""

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


def needs_of(root: "Path", to: Destination, entries: Sequence[Entry]) -> dict[str, tuple[str, RankNeeds]]:
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


def table_of(agreed: "AgreedLayout", needs: Mapping[str, RankNeeds]) -> ShardTable:
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
