"""What every rank does, rank 0 among them: bring its claims, write its parts, and digest its share of the files."""

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refitd_client.checkpoint.finite import any_nonfinite, count_nonfinite
from refitd_client.errors import PublishError
from refitd_client.files import durable
from refitd_client.files.plain_file import open_plain
from refitd_client.publish.attempt import PublishCall
from refitd_client.publish.options import PublishOptions
from refitd_client.publish.route import place_of_process
from refitd_client.sharded.digests import digested, fingerprinted
from refitd_client.sharded.holdings import Holding, HoldingsReader, NamingOptions, samples_of
from refitd_client.sharded.layout import Claim, Location, WritePart, runs
from refitd_client.sharded.lend_orders import LendOrder, LentReply
from refitd_client.sharded.rank_group import (
    DigestOrder,
    DoneReply,
    EndOrder,
    FailedReply,
    Opening,
    RankOrder,
    RankReply,
    RankTask,
    SendOrder,
    StagedReply,
    StageOrder,
    WriteOrder,
    portable,
)
from refitd_client.sharded.rank_reader import Reader, threads_of_rank
from refitd_client.sharded.rank_sender import RankSender
from refitd_client.sharded.rank_shadow import RankShadow
from refitd_client.sharded.rank_slot import SlotCopier
from refitd_client.sharded.reading import each_part, flat_box, not_finite_here
from refitd_client.sharded.shadow_orders import CompareOrder, GatherOrder, KeepOrder
from refitd_client.sharded.slot_gpu import gpu_of
from refitd_client.sharded.slot_orders import BlocksOrder, BlocksReply, CopyOrder, SlotOrder
from refitd_client.tensors import entry_of
from refitd_client.transport.ways import TrainerPlace


class Follower:
    """A rank's state from one publication to the next: its claims, and the task that rank 0 made of them."""

    def __init__(self, folder: Path, naming: NamingOptions, rank: int, ranks: int, options: PublishOptions) -> None:
        """Start the threads.

        Args:
            folder: the run's, as this rank sees it.
            naming: names and casts.
            rank: this one's number.
            ranks: how many there are.
            options: the publisher's.
        """
        self._folder = folder
        self._listed = HoldingsReader(naming)
        self._options, check_finite = options, options.check_finite
        self._reader = Reader(ranks)
        self._slot = SlotCopier(rank, ranks, threads_of_rank(ranks), check_finite=check_finite)
        self.sender = RankSender(folder, rank, check_finite=check_finite)
        self.shadow = RankShadow(options.delta_rules, stream=options.shadow == "stream", check_finite=check_finite)
        self._holdings: dict[str, Holding] = {}
        self._staging = folder
        self._claims: list[Claim] = []
        self._task: RankTask | None = None
        self._task_claims: list[Claim] | None = None

    def open(self, weights: Any, call: PublishCall) -> Opening | FailedReply:
        """Begin a publication: list what this rank holds.

        Args:
            weights: the module, or this rank's state dict.
            call: the other arguments of `publish`.
        """
        try:
            self._holdings = self._listed.read(weights, call.sharded or {})
            self._claims = [holding.claim for holding in self._holdings.values()]
            is_known = self._task is not None and self._claims == self._task_claims
            return Opening(
                step=call.step,
                layout=self._task.number if self._task is not None else 0,
                claims=None if is_known else self._claims,
                samples=samples_of(self._holdings.values()),
                transport=call.transport,
                place=None if call.transport is None else self._place(),
                durable=self._options.durable,
                delta_rules=self.shadow.rules,
                shadow=self.shadow.number_of(self._holdings),
                is_on_gpu=gpu_of(self._holdings) is not None,
            )
        except Exception as error:
            return FailedReply(error=portable(error))

    def _place(self) -> TrainerPlace:
        tensors = [each.tensor for each in self._holdings.values() if each.tensor.numel()]
        return place_of_process(tensors, count=len(tensors), is_rank=True)

    def answer(self, order: RankOrder) -> RankReply:
        """Carry an order out. A failure is an answer, too, because rank 0 waits for one."""
        try:
            match order:
                case CopyOrder() | BlocksOrder():
                    return self._in_slot(order)
                case WriteOrder():
                    self._write(order)
                    return DoneReply()
                case DigestOrder():
                    return self._digest(order)
                case StageOrder():
                    return self._stage(order)
                case LendOrder():
                    return self._lend(order)
                case SendOrder():
                    self.sender.begin(order)
                    return DoneReply()
                case EndOrder():
                    return self.sender.finish()
                case KeepOrder() | CompareOrder() | GatherOrder():
                    return self.shadow.answer(order, self._holdings)
        except Exception as error:
            return FailedReply(error=portable(error))

    def close(self) -> None:
        """End the threads and the process that sends, and free the buffers."""
        self.sender.close()
        self.shadow.drop()
        self._slot.close()
        self._reader.close()

    def forget(self) -> None:
        """Forget the task, and lend nothing: nothing was published, and rank 0 may have agreed on another layout."""
        self._task = self._task_claims = None
        self.sender.lender.end()

    def release(self) -> None:
        """Release the tensors."""
        self._slot.end()
        self.sender.stop()
        self.shadow.release()
        self._holdings = {}

    def _take(self, task: RankTask | None) -> RankTask:
        """The task of an order, which may be that of the last time."""
        if task is not None:
            self._task, self._task_claims = task, self._claims
        if self._task is None:
            raise PublishError("this rank was asked to write before it was told what")
        return self._task

    def _stage(self, order: StageOrder) -> StagedReply:
        task = self._take(order.task)
        return self.sender.stage(task, self._claims, self._holdings, order.partial)

    def _lend(self, order: LendOrder) -> LentReply:
        task, lender = self._take(order.task), self.sender.lender
        return lender.lend(task, self._claims, self._holdings, order.known)

    def _in_slot(self, order: SlotOrder) -> StagedReply | BlocksReply:
        if isinstance(order, BlocksOrder):
            return BlocksReply(digests=self._slot.digests())
        task, folder = self._take(order.task), self._folder / order.staging
        copied = self._slot.copy(folder, task, self._claims, self._holdings, fingerprinted=order.fingerprints)
        return StagedReply(scans=copied.found)

    def _write(self, order: WriteOrder) -> None:
        task = self._take(order.task)
        self._staging = self._folder / order.staging
        with _opening(self._staging, task.files) as files:
            self._write_parts(task, files)
            for number in sorted({task.locations[part.name].file for part in task.parts}):
                durable.sync(files()[number])  # each rank its own: another host's writes are in that host's memory

    def _write_parts(self, task: RankTask, files: Callable[[], Sequence[int]]) -> None:
        mine: dict[str, list[WritePart]] = {}
        for part in task.parts:
            mine.setdefault(part.name, []).append(part)

        def write(holding: Holding, local: Any, part: WritePart) -> None:
            self._write_part(holding.claim, local, part, task.locations[part.name], files)

        each_part(self._holdings, mine, write, names=sorted(task.locations))

    def _write_part(
        self, claim: Claim, local: Any, part: WritePart, location: Location, files: Callable[[], Sequence[int]]
    ) -> None:
        box, entry = claim.boxes[part.box], entry_of(claim.name, claim.dtype, claim.shape)
        item = entry.nbytes // prod(claim.shape)  # bytes of one element, as torch counts elements

        def use(first: int, data: NDArray[np.uint8]) -> int:
            if self._options.check_finite and any_nonfinite(entry.dtype, data):
                return count_nonfinite(entry.dtype, data)
            for run in runs(box, claim.shape, first, first + len(data) // item):
                piece = data[(run.begin - first) * item : (run.end - first) * item]
                durable.write_at(files()[location.file], piece.data, location.offset + run.at * item)
            return 0

        bad = self._reader.read(flat_box(local, claim.boxes, part.box), part.begin, part.end, claim.dtype, use)
        if bad:
            raise not_finite_here(claim.name, bad)

    def _digest(self, order: DigestOrder) -> DoneReply:
        done = DoneReply()
        paths = [self._staging / name for name in order.names]
        digest = fingerprinted if order.fingerprints else digested
        for path, (file, fingerprints) in zip(paths, self._reader.each(paths, digest), strict=True):
            done.files[path.name] = file
            done.fingerprints.update(fingerprints)
        return done


@contextmanager
def _opening(folder: Path, names: Sequence[str]) -> Generator[Callable[[], list[int]], None, None]:
    """A function that opens the version's shards for writing, at its first call. Rank 0 has made them."""
    with ExitStack() as stack:
        yield cache(lambda: [_open(stack, folder / name, os.O_RDWR) for name in names])


def _open(stack: ExitStack, path: Path, flags: int) -> int:
    fd = open_plain(path, flags)
    stack.callback(os.close, fd)
    return fd
