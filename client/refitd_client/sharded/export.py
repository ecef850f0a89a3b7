"""The shards of all ranks on their way out of memory: lent to engines on their host, or to processes that send.

A shard lies as it is published where it has the published dtype, is contiguous, and is on a GPU or in `SharedTensors`.
All else is copied. Each rank scans its shards (`RankExport`), and lends them until rank 0 gives another order, or until
the rank leaves the publication: it ends its lock then, and what an engine copies counts for nothing.

Rank 0 adds the scans up (`SharedExport`). To engines on their host its offer says where the shards lie. It names the
locks of all ranks: an engine counts what it copied while each rank lived and was still in the publication. Else each
rank's process sends what the rank lends.

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
from threading import Event
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from refitd_client.checkpoint.finite import NO_RULE, rule_of
from refitd_client.checkpoint.header import Entry
from refitd_client.errors import RankLostError
from refitd_client.fingerprint import Scan
from refitd_client.fingerprint.host import MASK
from refitd_client.sharded import orders
from refitd_client.sharded.holdings import Holding
from refitd_client.sharded.layout import AgreedLayout
from refitd_client.sharded.parts import (
    PartScanner,
    SentPart,
    add_scans,
    entries_of,
    flat_part,
    held_strips,
    lying,
    sent_parts,
)
from refitd_client.sharded.rank_group import error_of_rank
from refitd_client.transport import exporter
from refitd_client.transport.child import TransferSent
from refitd_client.transport.memory import LayoutCache, boot_id, host_name, path_at, process_life
from refitd_client.transport.needs import NeedsRefusedError, PartialNeeds, RankNeeds, numbered, read_needs
from refitd_client.transport.offer import (
    FORMAT_OF_RANKS,
    NOWHERE,
    GroupTransfer,
    Offer,
    OfferedPart,
    OfferedTensor,
    OfferLayout,
    offer_with,
    side_by_side,
)
from refitd_client.transport.schedule import HeldStrip
from refitd_client.transport.script import ShardTable
from refitd_client.transport.sending import Destination, NoTransferError, Sending, TensorSender

if TYPE_CHECKING:
    from refitd_client.sharded.shared_shards import SharedShards

ReplyT = TypeVar("ReplyT", bound=orders.RankReply)
_log = logging.getLogger("refitd_client")


class RankExport:
    """The shards of one rank. Nothing is begun before the first hand-over or transfer."""

    def __init__(self, folder: Path, rank: int, *, check_finite: bool) -> None:
        self._folder, self.rank = folder, rank
        self.sender = TensorSender(folder, f"rank {rank}")
        self._check_finite, self._scanner = check_finite, PartScanner(check_finite=check_finite)
        self._layouts = LayoutCache()
        self._layout: OfferLayout | None = None
        self._lock = ""
        self._told: tuple[Sequence[SentPart], OfferLayout] | None = None
        self._number = 0
        self._under_way: Sending | None = None

    def lend(
        self, order: orders.LendOrder, parts: Sequence[SentPart], holdings: Mapping[str, Holding]
    ) -> orders.LentReply:
        """Scan some parts, and say where they lie. The very same sequence means the same parts. Raises DriverError,
        NotSharedError, NoTransferError: other processes cannot read the memory; OSError: the lock cannot be made.
        """
        flats = self._readable(parts, holdings)
        rules = [rule_of(each.entry.dtype) if self._check_finite else NO_RULE for each in parts]
        named = {str(number): flat for number, flat in enumerate(flats)}
        layout = self._layout = self._layouts.prepare(named, rules).layout
        if self._told is None or self._told[0] is not parts or self._told[1] is not layout:
            self._told, self._number = (parts, layout), self._number + 1
        places = None
        if order.known is not None:
            if self._number != order.known:
                pairs = zip(parts, layout.tensors, strict=True)
                places = tuple(orders.LentPart(each.entry.name, each.strips, offered.place) for each, offered in pairs)
            if self.rank != 0 and not self._lock:
                self._lock = exporter.begin_rank(self._folder)
        scans: dict[str, tuple[int, int]] = {}
        addresses = [int(flat.data_ptr()) for flat in flats]
        add_scans(scans, parts, self._scanner.scan(parts, addresses, _device_of(holdings)))
        return orders.LentReply(
            scans=scans,
            slices=_slices(parts, flats, order.partial) if order.partial else {},
            number=self._number,
            places=places,
            lock=self._lock,
            host=host_name(),
            boot=boot_id(),
        )

    def open(self, to: Destination, senders: int) -> GroupTransfer:
        """Begin a transfer of what is lent, on rank 0. Raises NoTransferError."""
        return self.sender.open(to, self._lent_layout(), senders)

    def carry_out(self, order: orders.SendOrder | orders.EndOrder) -> orders.DoneReply | orders.SentReply:
        return self.begin(order) if isinstance(order, orders.SendOrder) else self.finish()

    def begin(self, order: orders.SendOrder) -> orders.DoneReply:
        """Send what is lent, in a thread of its own. Raises NoTransferError."""
        layout = self._lent_layout()

        def send(stop: Event) -> TransferSent:
            return self.sender.send(order.transfer, layout, stop, number=self.rank, table=order.table)

        self._under_way = Sending(send)
        return orders.DoneReply()

    def finish(self) -> orders.SentReply:
        """What has come of it. It does not wait for receivers any more."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return orders.SentReply(refused="nothing was sent")
        found = under_way.finish()
        return orders.SentReply(sent=found) if isinstance(found, TransferSent) else orders.SentReply(refused=str(found))

    def stop(self) -> None:
        """End what is under way, whatever has come of it: no process of this rank's reads its memory any more."""
        if self._under_way is not None:
            self.finish()

    def end(self) -> None:
        """Lend no more, at once: no engine may count what it copies from now on."""
        lock, self._lock = self._lock, ""
        if lock:
            exporter.end_rank(self._folder, lock)

    def close(self) -> None:
        self.end()
        self.sender.close()  # first: it ends what is under way
        self.stop()

    def _lent_layout(self) -> OfferLayout:
        if self._layout is None:
            raise NoTransferError("this rank lends nothing")
        return self._layout

    def _readable(self, parts: Sequence[SentPart], holdings: Mapping[str, Holding]) -> list[Any]:
        """The elements of each part where other processes can read them: as they lie, or copied."""
        import torch

        found = [_in_place(holdings[each.entry.name], each) for each in parts]
        copied = [number for number, flat in enumerate(found) if flat is None]
        offsets, nbytes = side_by_side(parts[number].nbytes for number in copied)
        memory: Any = self.sender.memory(nbytes, _device_of(holdings)) if copied else None
        for number, at in zip(copied, offsets, strict=True):
            each, holding = parts[number], holdings[parts[number].entry.name]
            found[number] = memory[at : at + each.nbytes].view(getattr(torch, holding.claim.dtype))
            found[number].copy_(flat_part(holding, each.part))
        return found


def _slices(
    parts: Sequence[SentPart], flats: Sequence[Any], partial: Mapping[str, PartialNeeds]
) -> dict[str, dict[str, int]]:
    """What the lent bytes add to the fingerprints of tensors that are needed in part, by digest and name."""
    import torch

    from refitd_client.transport.membership import FlatMemory
    from refitd_client.transport.proving import sent_slices

    held: dict[str, list[HeldStrip]] = {}
    for each in parts:
        held.setdefault(each.entry.name, []).extend(held_strips([each], {each.entry.name: 0}))
    dtypes = {each.entry.name: each.entry.dtype for each in parts}
    memory = FlatMemory([flat.view(torch.uint8) for flat in flats])
    return {
        digest: sent_slices(memory, held, dtypes, {name: strips for name, strips in some.items() if name in held})
        for digest, some in partial.items()
    }


def _device_of(holdings: Mapping[str, Holding]) -> Any:
    """The device that copies are made on: the GPU of this rank's tensors, or the host. Raises NoTransferError: they are
    on several.
    """
    import torch

    found = sorted({str(each.tensor.device) for each in holdings.values() if each.tensor.numel()})
    if len(found) > 1:
        raise NoTransferError(f"this rank's tensors are on several devices: {', '.join(found)}")
    return torch.device(found[0] if found else "cpu")


def _in_place(holding: Holding, part: SentPart) -> Any:
    """The elements of a part as a view of the tensor; None where they do not lie as they are published, or no other
    process can read them.
    """
    mine = lying(holding, part)
    if mine is None or (mine.device.type != "cuda" and path_at(int(mine.data_ptr())) is None):
        return None
    return mine


class _Lent(NamedTuple):
    """What one rank lends: the number of its places, and the name of its lock."""

    number: int
    places: tuple[orders.LentPart, ...]
    lock: str


class LentLayout:
    """Where all ranks' shards lie, from one hand-over to the next: made anew where one rank's have moved."""

    def __init__(self) -> None:
        self._lent: list[_Lent] = []
        self._made: tuple[AgreedLayout, list[_Lent], OfferLayout, bytes] | None = None

    def number(self, rank: int) -> int:
        """That of the places that are known of a rank, 0 for none."""
        return self._lent[rank].number if rank < len(self._lent) else 0

    def take(self, replies: Sequence[orders.LentReply]) -> None:
        """Take what all ranks say, by rank. Raises NoTransferError: they lend nothing that can be in one offer."""
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

    def offer(self, agreed: AgreedLayout, replies: Sequence[orders.LentReply]) -> tuple[OfferLayout, bytes]:
        """The layout of an offer of what was taken, and the same as JSON."""
        made = self._made
        if made is None or made[0] is not agreed or made[1] != self._lent:
            layout = offered_layout(agreed, [lent.places for lent in self._lent], [lent.lock for lent in self._lent])
            layout = msgspec.structs.replace(layout, host=replies[0].host, boot=replies[0].boot)
            made = self._made = agreed, self._lent, layout, msgspec.json.encode(layout)
        return made[2:]


def offered_layout(
    agreed: AgreedLayout, places: Sequence[Sequence[orders.LentPart]], locks: Sequence[str]
) -> OfferLayout:
    """An offer's layout, without the host. Pure. `locks` are the names of the ranks' locks; "" for rank 0."""
    parts: dict[str, list[OfferedPart]] = {}
    for part in (part for lent in places for part in lent):
        at = part.place.offset
        for strip in part.strips:
            place = msgspec.structs.replace(part.place, offset=at)
            parts.setdefault(part.name, []).append(OfferedPart(*strip, place))
            at += strip.nbytes
    tensors = (
        (each, tuple(sorted(parts.get(each.name, ()), key=lambda part: part.begin)))
        for each in entries_of(agreed.layout)
    )
    return OfferLayout(
        host="",
        boot="",
        pid=os.getpid(),
        life=process_life(),
        tensors=tuple(OfferedTensor(each.name, each.dtype, each.shape, NOWHERE, lent) for each, lent in tensors),
        format=FORMAT_OF_RANKS,
        lenders=tuple(lock for lock in locks if lock),
    )


class SharedExport:
    """The shards of all ranks (`transport.handover.Exported`): sent to a destination, or lent where they lie."""

    def __init__(self, shards: "SharedShards", destination: Destination | None) -> None:
        self._shards, self._destination, self._lent = shards, destination, shards.lead.lent
        self._entries = entries_of(shards.agreed.layout)
        self._replies: list[orders.LentReply] = []
        self._transfer: GroupTransfer | None = None
        self._needs: dict[str, tuple[str, RankNeeds]] = {}
        self._slices: dict[str, bytes] = {}

    def scan(self) -> Mapping[str, Scan]:
        """Have every rank scan what it lends. Returns what the scans add up to. Raises NoTransferError: a rank cannot
        lend what it has, or they cannot lend it together; RankLostError: a rank is gone.
        """
        shards, is_lent = self._shards, self._destination is None
        if self._destination is not None:
            self._needs = needs_of(shards.lead.root, self._destination, self._entries)
        partial = {digest: needs.partial() for digest, needs in self._needs.values()}
        asked = [
            orders.LendOrder(
                task=shards.task_of(rank), known=self._lent.number(rank) if is_lent else None, partial=partial
            )
            for rank in range(shards.ranks)
        ]
        replies = self._replies = self._all(asked, "lend its part", orders.LentReply)
        shards.all_know_the_task()
        if is_lent:
            self._lent.take(replies)
        for digest, some in partial.items():
            sums = (sum(each.slices[digest].get(name, 0) for each in replies) & MASK for name in some)
            self._slices[digest] = struct.pack(f"<{len(some)}Q", *sums)
        found = {entry.name: (0, 0) for entry in self._entries}
        for name, (fingerprint, bad) in (item for reply in replies for item in reply.scans.items()):
            found[name] = (found[name][0] + fingerprint) & MASK, found[name][1] + bad
        return {name: Scan(*each) for name, each in found.items()}

    def offer(self, version: str, fingerprints: Sequence[int]) -> Offer:
        """An offer of what was scanned. Tensors that are sent lie nowhere whole. Raises NoTransferError: rank 0's
        sender cannot be begun.
        """
        if self._destination is None:
            layout, line = self._lent.offer(self._shards.agreed, self._replies)
            return offer_with(layout, version, fingerprints, line)
        opened = self._shards.lead.follower.export.open(self._destination, self._shards.ranks)
        digests = {name: digest for name, (digest, _) in self._needs.items()}
        self._transfer = msgspec.structs.replace(opened, needs=digests, slices=self._slices)
        tensors = tuple(OfferedTensor(each.name, each.dtype, each.shape, NOWHERE) for each in self._entries)
        layout = OfferLayout(host=host_name(), boot=boot_id(), pid=os.getpid(), life="", tensors=tensors)
        return replace(offer_with(layout, version, fingerprints), transfer=self._transfer)

    def send(self) -> "ShardsUnderWay | None":
        """Have every rank begin to send. A rank that cannot ends the transfer, and so does one that is gone."""
        if self._transfer is None:
            return None
        table = table_of(self._shards.agreed, {name: needs for name, (_, needs) in self._needs.items()})
        asked: list[orders.RankOrder] = [orders.SendOrder(transfer=self._transfer)] * self._shards.ranks
        asked[0] = orders.SendOrder(transfer=self._transfer, table=table)
        under_way = ShardsUnderWay(self._shards)
        try:
            self._all(asked, "begin to send", orders.DoneReply)
        except (NoTransferError, RankLostError) as error:
            under_way.failed.append(f"{error}")
            self._shards.lead.follower.export.stop()  # it would wait for the rank that does not come
        return under_way

    def _all(self, asked: Sequence[orders.RankOrder], doing: str, kind: type[ReplyT]) -> list[ReplyT]:
        """The replies of all ranks. Raises NoTransferError: one has failed. RankLostError: one is gone."""
        found: list[ReplyT] = []
        for rank, reply in enumerate(self._shards.ask(asked, doing)):
            if isinstance(reply, orders.FailedReply):
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
        """`is_sent` does not wait."""

    def finish(self) -> TransferSent | NoTransferError:
        """What has come of it on all ranks. The memory that they sent from is theirs again."""
        try:
            replies = self.shards.ask([orders.EndOrder()] * self.shards.ranks, "end its transfer")
        except RankLostError as error:  # the files will say so as well
            return NoTransferError("; ".join([*self.failed, str(error)]))
        sent = [reply.sent for reply in replies if isinstance(reply, orders.SentReply) and reply.sent is not None]
        refused = list(self.failed)  # the first sender's reason first: the others mostly say that it has ended
        for rank, reply in enumerate(replies):
            why = (
                reply.refused
                if isinstance(reply, orders.SentReply)
                else reply.error
                if isinstance(reply, orders.FailedReply)
                else ""
            )
            refused += [f"rank {rank}: {why}"] if why else []
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
    names = [entry.name for entry in entries]
    numbers = {name: number for number, name in enumerate(names)}
    return ShardTable(
        sizes=tuple(entry.nbytes for entry in entries),
        held=tuple(
            tuple(held_strips(sent_parts(parts, claims), numbers))
            for parts, claims in zip(agreed.layout.parts, agreed.claims, strict=True)
        ),
        needs={receiver: numbered(each, names) for receiver, each in needs.items()},
    )
