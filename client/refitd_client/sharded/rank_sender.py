"""One rank's part in a transfer: its shards copied into memory of their own, scanned there, and sent from there."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Any

from refitd_client.sharded.holdings import Holding
from refitd_client.sharded.layout import Claim
from refitd_client.sharded.part_scanner import PartScanner
from refitd_client.sharded.parts import SentPart, held_by_name, sent_parts
from refitd_client.sharded.rank_group import RankTask, SendOrder, SentReply, StagedReply
from refitd_client.sharded.rank_lender import RankLender, device_of
from refitd_client.sharded.reading import add_scans, each_part, flat_box
from refitd_client.transport.group.child import TransferSent
from refitd_client.transport.group.sending import Destination, NoTransferError, Sending
from refitd_client.transport.ipc.offer import GroupTransfer
from refitd_client.transport.shards.needs import PartialNeeds
from refitd_client.transport.shards.sending import ShardSender


class RankSender:
    """The shards of one rank on their way. Nothing is begun before the first transfer."""

    def __init__(self, folder: Path, rank: int, *, check_finite: bool) -> None:
        """Begin nothing.

        Args:
            folder: the run's, as this rank sees it.
            rank: this one's number.
            check_finite: whether NaN and infinity count.
        """
        name = hashlib.sha256(f"{folder}\0{rank}".encode()).hexdigest()[:16]
        self.rank, self.process = rank, ShardSender(f"shards-{name}")
        self.lender = RankLender(folder, rank, self.process, check_finite=check_finite)
        self._scanner = PartScanner(check_finite=check_finite)
        self._under_way: Sending | None = None
        self._needed: dict[str, PartialNeeds | None] = {}
        self._known: tuple[RankTask, list[SentPart], int] | None = None

    def stage(
        self,
        task: RankTask,
        claims: Sequence[Claim],
        holdings: Mapping[str, Holding],
        partial: Mapping[str, PartialNeeds | None],
    ) -> StagedReply:
        """Copy the parts in their published dtypes, and find what they add to the tensors' fingerprints.

        Args:
            task: what this rank writes, and sends.
            claims: what it holds.
            holdings: its tensors.
            partial: what engine ranks need of tensors that they need in part, as in `StageOrder`.
        """
        parts, nbytes = self._parts_of(task, claims)
        import torch

        memory = self.process.memory(max(nbytes, 1), device_of(holdings))
        mine: dict[str, list[SentPart]] = {}
        for each in parts:
            mine.setdefault(each.entry.name, []).append(each)

        def copy(holding: Holding, local: Any, sent: SentPart) -> None:
            box = flat_box(local, holding.claim.boxes, sent.part.box)
            there = memory[sent.at : sent.at + sent.nbytes].view(getattr(torch, holding.claim.dtype))
            there.copy_(box[sent.part.begin : sent.part.end])

        each_part(holdings, mine, copy, names=sorted(task.locations))
        if memory.is_cuda:  # another process reads the copies
            torch.cuda.synchronize(memory.device)
        found = StagedReply()
        addresses = [memory.data_ptr() + each.at for each in parts]
        add_scans(found.scans, parts, self._scanner.scan(parts, addresses, memory.device))
        if partial:
            found.slices.update(self._slices(parts, partial))
        return found

    def _slices(
        self, parts: Sequence[SentPart], partial: Mapping[str, PartialNeeds | None]
    ) -> dict[str, dict[str, int]]:
        """What the staged bytes add to the fingerprints of tensors that are needed in part, by digest and name.

        Raises:
            NoTransferError: these are needs that this rank was not told of.
        """
        from refitd_client.transport.shards.proving import sent_slices

        self._needed = {digest: self._needed.get(digest) if some is None else some for digest, some in partial.items()}
        held, dtypes = held_by_name(parts), {each.entry.name: each.entry.dtype for each in parts}
        found: dict[str, dict[str, int]] = {}
        for digest, some in self._needed.items():
            if some is None:
                raise NoTransferError("this rank was not told what engine ranks need")
            mine = {name: strips for name, strips in some.items() if name in held}
            found[digest] = sent_slices(self.process.staged, held, dtypes, mine)
        return found

    def _parts_of(self, task: RankTask, claims: Sequence[Claim]) -> tuple[list[SentPart], int]:
        """The parts of a task: worked out once for each layout."""
        if self._known is None or self._known[0] is not task:
            self._known = task, *sent_parts(task.parts, claims)
        return self._known[1:]

    def open(self, to: Destination, senders: int) -> GroupTransfer:
        """Begin a transfer, on rank 0. Raises NoTransferError."""
        return self.process.open(to, senders)

    def begin(self, order: SendOrder) -> None:
        """Send, in a thread of its own."""
        transfer, table = order.transfer, order.table

        def send(stop: Event) -> TransferSent:
            return self.process.send(transfer, self.rank, table, stop)

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
        """End what is under way, whatever has come of it: the memory is this rank's again."""
        if self._under_way is not None:
            self.finish()

    def close(self) -> None:
        """End the process, and free the memory."""
        self.lender.end()
        self.process.close()  # first: it ends what is under way
        self.stop()
