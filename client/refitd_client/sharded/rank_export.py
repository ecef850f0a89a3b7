"""One rank's shards on their way out of its memory: lent to engines on its host, or to its own process that sends.

A shard lies as it is published where it has the published dtype, is contiguous, and is on a GPU or in `SharedTensors`.
All else is copied. Either is scanned, and lent until rank 0 gives another order, or until this rank leaves the
publication: it ends its lock then, and what an engine copies counts for nothing.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Any

from refitd_client.checkpoint.finite import NO_RULE, rule_of
from refitd_client.sharded.holdings import Holding
from refitd_client.sharded.layout import Claim
from refitd_client.sharded.orders import LendOrder, LentPart, LentReply, RankTask, SendOrder, SentReply
from refitd_client.sharded.parts import (
    PartScanner,
    SentPart,
    add_scans,
    each_part,
    flat_box,
    held_by_name,
    lying,
    sent_parts,
)
from refitd_client.transport import exporter
from refitd_client.transport.child import TransferSent
from refitd_client.transport.memory import LayoutCache, boot_id, host_name, path_at
from refitd_client.transport.needs import PartialNeeds
from refitd_client.transport.offer import GroupTransfer, OfferLayout, side_by_side
from refitd_client.transport.sending import Destination, NoTransferError, Sending, TensorSender


class RankExport:
    """The shards of one rank. Nothing is begun before the first hand-over or transfer."""

    def __init__(self, folder: Path, rank: int, *, check_finite: bool) -> None:
        self._folder, self.rank = folder, rank
        self.sender = TensorSender(folder, f"rank {rank}")
        self._check_finite, self._scanner = check_finite, PartScanner(check_finite=check_finite)
        self._layouts = LayoutCache()
        self._layout: OfferLayout | None = None
        self._lock = ""
        self._parts: tuple[RankTask, list[SentPart]] | None = None
        self._told: tuple[RankTask, OfferLayout] | None = None
        self._number = 0
        self._needed: dict[str, PartialNeeds | None] = {}
        self._under_way: Sending | None = None

    def lend(
        self, order: LendOrder, task: RankTask, claims: Sequence[Claim], holdings: Mapping[str, Holding]
    ) -> LentReply:
        """Scan the parts of a task, and say where they lie.

        Raises:
            DriverError, NotSharedError, NoTransferError: other processes cannot read the memory.
            OSError: the lock cannot be made.
        """
        if self._parts is None or self._parts[0] is not task:
            self._parts = task, sent_parts(task.parts, claims)[0]
        parts = self._parts[1]
        flats = self._lying(task, parts, holdings)
        rules = [rule_of(each.entry.dtype) if self._check_finite else NO_RULE for each in parts]
        named = {str(number): flat for number, flat in enumerate(flats)}
        layout = self._layout = self._layouts.prepare(named, rules).layout
        if self._told is None or self._told[0] is not task or self._told[1] is not layout:
            self._told, self._number = (task, layout), self._number + 1
        places = None
        if order.known is not None:
            if self._number != order.known:
                places = tuple(
                    LentPart(each.entry.name, each.strips, offered.place)
                    for each, offered in zip(parts, layout.tensors, strict=True)
                )
            if self.rank != 0 and not self._lock:
                self._lock = exporter.begin_rank(self._folder)
        scans: dict[str, tuple[int, int]] = {}
        addresses = [int(flat.data_ptr()) for flat in flats]
        add_scans(scans, parts, self._scanner.scan(parts, addresses, _device_of(holdings)))
        return LentReply(
            scans=scans,
            slices=self._slices(parts, flats, order.partial) if order.partial else {},
            number=self._number,
            places=places,
            lock=self._lock,
            host=host_name(),
            boot=boot_id(),
        )

    def open(self, to: Destination, senders: int) -> GroupTransfer:
        """Begin a transfer of what is lent, on rank 0. Raises NoTransferError."""
        return self.sender.open(to, self._lent_layout(), senders)

    def begin(self, order: SendOrder) -> None:
        """Send what is lent, in a thread of its own. Raises NoTransferError."""
        layout = self._lent_layout()

        def send(stop: Event) -> TransferSent:
            return self.sender.send(order.transfer, layout, stop, number=self.rank, table=order.table)

        self._under_way = Sending(send)

    def finish(self) -> SentReply:
        """What has come of it. It does not wait for receivers any more."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return SentReply(refused="nothing was sent")
        match under_way.finish():
            case TransferSent() as sent:
                return SentReply(sent=sent)
            case NoTransferError() as error:
                return SentReply(refused=str(error))

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
        """End the process, and free the memory."""
        self.end()
        self.sender.close()  # first: it ends what is under way
        self.stop()

    def _lent_layout(self) -> OfferLayout:
        if self._layout is None:
            raise NoTransferError("this rank lends nothing")
        return self._layout

    def _lying(self, task: RankTask, parts: Sequence[SentPart], holdings: Mapping[str, Holding]) -> list[Any]:
        """The elements of each part where other processes can read them."""
        found = [_in_place(holdings[each.entry.name], each) for each in parts]
        copied = [number for number, flat in enumerate(found) if flat is None]
        offsets, nbytes = side_by_side(parts[number].nbytes for number in copied)
        places = dict(zip(copied, offsets, strict=True))
        mine: dict[str, list[int]] = {}
        for number in copied:
            mine.setdefault(parts[number].entry.name, []).append(number)
        memory: Any = self.sender.memory(nbytes, _device_of(holdings)) if copied else None

        def copy(holding: Holding, local: Any, number: int) -> None:
            import torch

            each = parts[number]
            there = memory[places[number] : places[number] + each.nbytes].view(getattr(torch, holding.claim.dtype))
            there.copy_(flat_box(local, holding.claim.boxes, each.part.box)[each.part.begin : each.part.end])
            found[number] = there

        each_part(holdings, mine, copy, names=sorted(task.locations))
        return found

    def _slices(
        self, parts: Sequence[SentPart], flats: Sequence[Any], partial: Mapping[str, PartialNeeds | None]
    ) -> dict[str, dict[str, int]]:
        """What the lent bytes add to the fingerprints of tensors that are needed in part, by digest and name.

        Raises:
            NoTransferError: these are needs that this rank was not told of.
        """
        import torch

        from refitd_client.transport.membership import FlatMemory
        from refitd_client.transport.proving import sent_slices

        self._needed = {digest: self._needed.get(digest) if some is None else some for digest, some in partial.items()}
        held, dtypes = held_by_name(parts), {each.entry.name: each.entry.dtype for each in parts}
        memory = FlatMemory([flat.view(torch.uint8) for flat in flats])
        found: dict[str, dict[str, int]] = {}
        for digest, some in self._needed.items():
            if some is None:
                raise NoTransferError("this rank was not told what engine ranks need")
            mine = {name: strips for name, strips in some.items() if name in held}
            found[digest] = sent_slices(memory, held, dtypes, mine)
        return found


def _device_of(holdings: Mapping[str, Holding]) -> Any:
    """The device that copies are made on: the GPU of this rank's tensors, or the host.

    Raises:
        NoTransferError: they are on several.
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
