"""One rank's part in a hand-over: its shards scanned where they lie, or copied where no other process can read them.

A shard lies as it is published where it has the published dtype, is contiguous, and is on a GPU or in `SharedTensors`.
All else is copied into the memory that transfers are sent from. Either is lent until rank 0 gives another order, or
until this rank leaves the publication: it ends its lock then, and what an engine copies counts for nothing.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from refitd_client.checkpoint.finite import NO_RULE, rule_of
from refitd_client.sharded.holdings import Holding
from refitd_client.sharded.layout import Claim
from refitd_client.sharded.lend_orders import LentPart, LentReply
from refitd_client.sharded.part_scanner import PartScanner
from refitd_client.sharded.parts import SentPart, sent_parts
from refitd_client.sharded.rank_group import RankTask
from refitd_client.sharded.reading import add_scans, each_part, flat_box, lying
from refitd_client.transport.group.sending import NoTransferError
from refitd_client.transport.ipc import exporter, shared
from refitd_client.transport.ipc.exported_memory import LayoutCache
from refitd_client.transport.ipc.offer import OfferLayout, side_by_side
from refitd_client.transport.ipc.shared import boot_id, host_name
from refitd_client.transport.shards.sending import ShardSender


class RankLender:
    """The shards of one rank, lent to engines on its host. Nothing is begun before the first hand-over."""

    def __init__(self, folder: Path, rank: int, copies: ShardSender, *, check_finite: bool) -> None:
        """Remember where.

        Args:
            folder: the run's, as this rank sees it.
            rank: this one's number.
            copies: has memory for what is copied.
            check_finite: whether NaN and infinity count.
        """
        self._folder, self._rank, self._copies = folder, rank, copies
        self._check_finite, self._scanner = check_finite, PartScanner(check_finite=check_finite)
        self._layouts = LayoutCache()
        self._lock = ""
        self._parts: tuple[RankTask, list[SentPart]] | None = None
        self._told: tuple[RankTask, OfferLayout] | None = None
        self._number = 0

    def lend(
        self,
        task: RankTask,
        claims: Sequence[Claim],
        holdings: Mapping[str, Holding],
        known: int,
    ) -> LentReply:
        """Scan the parts of a task, and say where they lie.

        Args:
            task: what this rank writes, and lends.
            claims: what it holds.
            holdings: its tensors.
            known: the number of the places that rank 0 has.

        Raises:
            DriverError, NotSharedError, NoTransferError: other processes cannot read the memory.
            OSError: the lock cannot be made.
        """
        if self._parts is None or self._parts[0] is not task:
            self._parts = task, sent_parts(task.parts, claims)[0]
        parts = self._parts[1]
        flats = self._lying(task, parts, holdings)
        rules = [rule_of(each.entry.dtype) if self._check_finite else NO_RULE for each in parts]
        layout = self._layouts.prepare({str(number): flat for number, flat in enumerate(flats)}, rules).layout
        if self._told is None or self._told[0] is not task or self._told[1] is not layout:
            self._told, self._number = (task, layout), self._number + 1
        places = None
        if self._number != known:
            places = tuple(
                LentPart(each.entry.name, each.strips, offered.place)
                for each, offered in zip(parts, layout.tensors, strict=True)
            )
        if self._rank != 0 and not self._lock:
            self._lock = exporter.begin_rank(self._folder)
        scans: dict[str, tuple[int, int]] = {}
        addresses = [int(flat.data_ptr()) for flat in flats]
        add_scans(scans, parts, self._scanner.scan(parts, addresses, device_of(holdings)))
        return LentReply(
            scans=scans,
            number=self._number,
            places=places,
            lock=self._lock,
            host=host_name(),
            boot=boot_id(),
        )

    def end(self) -> None:
        """Lend no more, at once: no engine may count what it copies from now on."""
        lock, self._lock = self._lock, ""
        if lock:
            exporter.end_rank(self._folder, lock)

    def _lying(self, task: RankTask, parts: Sequence[SentPart], holdings: Mapping[str, Holding]) -> list[Any]:
        """The elements of each part where other processes can read them."""
        found = [_in_place(holdings[each.entry.name], each) for each in parts]
        copied = [number for number, flat in enumerate(found) if flat is None]
        offsets, nbytes = side_by_side(parts[number].nbytes for number in copied)
        places = dict(zip(copied, offsets, strict=True))
        mine: dict[str, list[int]] = {}
        for number in copied:
            mine.setdefault(parts[number].entry.name, []).append(number)
        memory: Any = self._copies.memory(nbytes, device_of(holdings)) if copied else None

        def copy(holding: Holding, local: Any, number: int) -> None:
            import torch

            each = parts[number]
            there = memory[places[number] : places[number] + each.nbytes].view(getattr(torch, holding.claim.dtype))
            there.copy_(flat_box(local, holding.claim.boxes, each.part.box)[each.part.begin : each.part.end])
            found[number] = there

        each_part(holdings, mine, copy, names=sorted(task.locations))
        return found


def device_of(holdings: Mapping[str, Holding]) -> Any:
    """The device that the copies are made on: the GPU of this rank's tensors, or the host.

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
    if mine is None or (mine.device.type != "cuda" and shared.path_at(int(mine.data_ptr())) is None):
        return None
    return mine
