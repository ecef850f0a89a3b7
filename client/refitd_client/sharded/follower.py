"""What every rank does, rank 0 among them: bring its claims, write its parts, and digest its share of the files.

A local tensor's bytes come into host memory in pieces that fit the processor's cache, cast, and copied from a GPU.
Pieces are taken by several threads, as many as this rank's share of the processors. From a GPU the bytes come through
two pinned buffers: one is filled while the threads work on the other. Buffers and threads stay with the publisher, for
pinning costs more than copying. `torch.cuda` is called only for a tensor that lives on a GPU and so has a context.
"""

import os
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from refitd_client.checkpoint import header
from refitd_client.checkpoint.finite import any_nonfinite, count_nonfinite
from refitd_client.contract.manifest import FileDigest, ManifestFile
from refitd_client.errors import PublishError
from refitd_client.files import durable
from refitd_client.files.plain_file import open_plain, plain_file, read_at
from refitd_client.publish.attempt import PublishCall
from refitd_client.publish.options import PublishOptions
from refitd_client.publish.route import place_of_process
from refitd_client.sharded.holdings import Holding, HoldingsReader, NamingOptions, gpu_of, samples_of
from refitd_client.sharded.layout import Claim, Location, WritePart, runs
from refitd_client.sharded.orders import (
    BlocksOrder,
    BlocksReply,
    CompareOrder,
    CopiedReply,
    CopyOrder,
    DigestOrder,
    DoneReply,
    EndOrder,
    FailedReply,
    GatherOrder,
    KeepOrder,
    LendOrder,
    Opening,
    RankOrder,
    RankReply,
    RankTask,
    SendOrder,
    WriteOrder,
)
from refitd_client.sharded.parts import each_part, flat_box, not_finite_here
from refitd_client.sharded.rank_export import RankExport
from refitd_client.sharded.rank_group import portable
from refitd_client.sharded.rank_shadow import RankShadow
from refitd_client.sharded.rank_slot import SlotCopier
from refitd_client.tensors import entry_of
from refitd_client.ways import TrainerPlace
from refitd_client.write.plan import PIECE, ShardChecks

PIECE_BYTES = 2**20
_TASK_BYTES = 2**22  # worth handing to a thread
_BOUNCE_BYTES = 2**26
_MOST_THREADS = 16

Use = Callable[[int, NDArray[np.uint8]], int]
In = TypeVar("In")
Out = TypeVar("Out")


def threads_of_rank(ranks: int) -> int:
    """How many threads a rank works with: `ranks` share the host's processors, unless the launcher says how many do
    (LOCAL_WORLD_SIZE).
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or ranks
    return min(_MOST_THREADS, max(1, len(os.sched_getaffinity(0)) // here))


class Reader:
    """Reads local tensors. One caller at a time."""

    def __init__(self, ranks: int) -> None:
        """`ranks` as in `threads_of_rank`."""
        self._pool = ThreadPoolExecutor(threads_of_rank(ranks), thread_name_prefix="refitd-rank")
        self._buffers: list[_BounceBuffer] = []

    def close(self) -> None:
        """End the threads, and free the buffers."""
        self._pool.shutdown()
        self._buffers = []

    def each(self, items: Iterable[In], do: Callable[[In], Out]) -> list[Out]:
        """Call `do` with every item, in the threads."""
        return list(self._pool.map(do, items))

    def read(self, flat: Any, begin: int, end: int, dtype: str, use: Use) -> int:
        """Have every piece of a tensor used, in any order and at once.

        No call of `use` is going on any more when this returns or raises: the files that it writes to may be closed.

        Args:
            use: called with a piece's first element and its bytes, which are valid during the call.

        Returns:
            The sum of what `use` returned.
        """
        torch: Any = sys.modules["torch"]
        kind = getattr(torch, dtype)
        if flat.device.type == "cuda":
            return self._from_gpu(torch, flat, begin, end, kind, use)
        work = _pieces(torch, flat, 0, kind, use)
        if (end - begin) * kind.itemsize <= _TASK_BYTES:
            return work(begin, end)
        return _ended(self._tasks(work, begin, end, kind.itemsize))

    def _tasks(self, work: Callable[[int, int], int], begin: int, end: int, item: int) -> "list[Future[int]]":
        step = _TASK_BYTES // item
        return [self._pool.submit(work, first, min(first + step, end)) for first in range(begin, end, step)]

    def _from_gpu(self, torch: Any, flat: Any, begin: int, end: int, kind: Any, use: Use) -> int:
        if not self._buffers:
            self._buffers = [_BounceBuffer(torch) for _ in range(2)]
        total, filled = 0, None
        step = _BOUNCE_BYTES // kind.itemsize

        def start(buffer: _BounceBuffer) -> None:
            here = buffer.arrived().view(kind)
            work = _pieces(torch, here, buffer.first, kind, use)
            buffer.tasks = self._tasks(work, buffer.first, buffer.first + here.numel(), kind.itemsize)

        with torch.cuda.device(flat.device):
            try:
                for number, first in enumerate(range(begin, end, step)):
                    buffer = self._buffers[number % 2]
                    total += _ended(buffer.take_tasks())
                    buffer.fill(flat[first : min(first + step, end)].to(kind), first)
                    if filled is not None:
                        start(filled)
                    filled = buffer
                if filled is not None:
                    start(filled)
            finally:
                total += _ended([task for buffer in self._buffers for task in buffer.take_tasks()])
        return total


class _BounceBuffer:
    """A pinned buffer, and the threads' tasks on its content, which begins with the tensor's element `first`."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._memory = torch.empty(_BOUNCE_BYTES, dtype=torch.uint8, pin_memory=True)
        self._data: Any = None
        self._done: Any = None
        self.first = 0
        self.tasks: list[Future[int]] = []

    def fill(self, data: Any, first: int) -> None:
        """Begin to copy elements from a GPU."""
        raw = data.view(self._torch.uint8)
        self._data, self.first = self._memory[: raw.numel()], first
        self._data.copy_(raw, non_blocking=True)
        self._done = self._torch.cuda.Event()
        self._done.record()

    def arrived(self) -> Any:
        """Wait for the copy. Returns its bytes."""
        self._done.synchronize()
        return self._data

    def take_tasks(self) -> "list[Future[int]]":
        """The tasks, which the caller waits for."""
        tasks, self.tasks = self.tasks, []
        return tasks


def _ended(tasks: "list[Future[int]]") -> int:
    """Wait for all tasks, also after one fails; then raise its error, or add up what they return."""
    try:
        wait(tasks, return_when=FIRST_EXCEPTION)
    finally:
        begun = [task for task in tasks if not task.cancel()]
        wait(begun)
    return sum(task.result() for task in begun)


def _pieces(torch: Any, flat: Any, shift: int, kind: Any, use: Use) -> Callable[[int, int], int]:
    """Work on elements of a tensor in host memory, whose first element has number `shift`."""
    step = PIECE_BYTES // kind.itemsize

    def work(begin: int, end: int) -> int:
        total = 0
        for first in range(begin, end, step):
            part = flat[first - shift : min(first + step, end) - shift].to(device="cpu", dtype=kind)
            total += use(first, part.view(torch.uint8).numpy())
        return total

    return work


_DIGESTED_AT_ONCE = 2**20

# All ranks have written and synced the files. They are opened anew to be digested: on a network file system that is
# what makes another host's bytes visible. So the manifest describes the bytes that are there.


def digested(path: Path) -> tuple[ManifestFile, dict[str, int]]:
    """A file's entry in the manifest."""
    with plain_file(path) as fd:
        found, size = FileDigest(), 0
        buffer = memoryview(bytearray(_DIGESTED_AT_ONCE))
        while count := os.readv(fd, [buffer]):
            found.update(buffer[:count])
            size += count
    return ManifestFile(size=size, digest=found.text), {}


def fingerprinted(path: Path) -> tuple[ManifestFile, dict[str, int]]:
    """The same, and the fingerprint of each tensor, in one pass."""
    located = header.locate(path).values()
    entries = [entry for entry, _ in located]
    with plain_file(path) as fd:
        size = os.fstat(fd).st_size
        head = read_at(fd, size - sum(entry.nbytes for entry in entries), 0)
        proof = ShardChecks(head, check_finite=False, fingerprinted=[entry.name for entry in entries])
        for entry, offset in located:
            for begin in range(0, entry.nbytes, PIECE):
                data = read_at(fd, min(PIECE, entry.nbytes - begin), offset + begin)
                proof.add([entry], begin, np.frombuffer(data, np.uint8))
    return ManifestFile(size=size, digest=proof.digest), proof.fingerprints


class Follower:
    """A rank's state from one publication to the next: its claims, and the task that rank 0 made of them."""

    def __init__(self, folder: Path, naming: NamingOptions, rank: int, ranks: int, options: PublishOptions) -> None:
        self._folder = folder
        self._listed = HoldingsReader(naming)
        self._options, check_finite = options, options.check_finite
        self._reader = Reader(ranks)
        self._slot = SlotCopier(rank, ranks, threads_of_rank(ranks), check_finite=check_finite)
        self.export = RankExport(folder, rank, check_finite=check_finite)
        self.shadow = RankShadow(options.delta_rules, stream=options.shadow == "stream", check_finite=check_finite)
        self._holdings: dict[str, Holding] = {}
        self._staging = folder
        self._claims: list[Claim] = []
        self._task: RankTask | None = None
        self._task_claims: list[Claim] | None = None

    def open(self, weights: Any, call: PublishCall) -> Opening | FailedReply:
        """Begin a publication: list what this rank holds."""
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
                case CopyOrder():
                    return self._copy(order)
                case BlocksOrder():
                    return BlocksReply(digests=self._slot.digests())
                case WriteOrder():
                    self._write(order)
                    return DoneReply()
                case DigestOrder():
                    return self._digest(order)
                case LendOrder():
                    return self.export.lend(order, self._take(order.task), self._claims, self._holdings)
                case SendOrder():
                    self.export.begin(order)
                    return DoneReply()
                case EndOrder():
                    return self.export.finish()
                case KeepOrder() | CompareOrder() | GatherOrder():
                    return self.shadow.answer(order, self._holdings)
        except Exception as error:
            return FailedReply(error=portable(error))

    def close(self) -> None:
        """End the threads and the process that sends, and free the buffers."""
        self.export.close()
        self.shadow.drop()
        self._slot.close()
        self._reader.close()

    def forget(self) -> None:
        """Forget the task, and lend nothing: nothing was published, and rank 0 may have agreed on another layout."""
        self._task = self._task_claims = None
        self.export.end()

    def release(self) -> None:
        self._slot.end()
        self.export.stop()
        self.shadow.release()
        self._holdings = {}

    def _take(self, task: RankTask | None) -> RankTask:
        """The task of an order, which may be that of the last time."""
        if task is not None:
            self._task, self._task_claims = task, self._claims
        if self._task is None:
            raise PublishError("this rank was asked to write before it was told what")
        return self._task

    def _copy(self, order: CopyOrder) -> CopiedReply:
        task, folder = self._take(order.task), self._folder / order.staging
        copied = self._slot.copy(folder, task, self._claims, self._holdings, fingerprinted=order.fingerprints)
        return CopiedReply(scans=copied.found)

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
