"""What every rank does, rank 0 among them: bring its claims, write its parts, and digest its share of the files.

A local tensor's bytes come into host memory in pieces that fit the processor's cache, cast, and copied from a GPU by
way of a pinned buffer. Pieces are taken by several threads, as many as this rank's share of the processors. Buffer and
threads stay with the publisher, for pinning costs more than copying. `torch.cuda` is called only for a tensor that
lives on a GPU and so has a context.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
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
from refitd_client.publish.ports import SourceReading, reading_of
from refitd_client.sharded import orders
from refitd_client.sharded.export import RankExport
from refitd_client.sharded.holdings import Holding, HoldingsReader, NamingOptions, gpu_of, samples_of
from refitd_client.sharded.layout import Claim
from refitd_client.sharded.parts import SentPart, flat_part, not_finite_here, sent_parts
from refitd_client.sharded.rank_group import portable
from refitd_client.sharded.rank_shadow import RankShadow
from refitd_client.sharded.rank_slot import SlotCopier
from refitd_client.tensors import is_source
from refitd_client.transport.choice import TrainerPlace
from refitd_client.transport.schedule import Strip, cut
from refitd_client.transport.sending import place_of_process
from refitd_client.write.plan import PIECE, ShardChecks

PIECE_BYTES = 2**20
_TASK_BYTES = 2**22  # worth handing to a thread
_BOUNCE_BYTES = 2**26
_MOST_THREADS = 16
_DIGESTED_AT_ONCE = 2**20

Use = Callable[[Strip, NDArray[np.uint8]], int]
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
        self._pool = ThreadPoolExecutor(threads_of_rank(ranks), thread_name_prefix="refitd-rank")
        self._bounce: Any = None

    def close(self) -> None:
        self._pool.shutdown()
        self._bounce = None

    def each(self, items: Iterable[In], do: Callable[[In], Out]) -> list[Out]:
        return list(self._pool.map(do, items))

    def read(self, flat: Any, strips: Iterable[Strip], dtype: str, use: Use) -> int:
        """Have every piece of some elements used, in any order and at once. Returns the sum of what `use` returned.

        No call of `use` is going on any more when this returns or raises: the files that it writes to may be closed.

        Args:
            flat: the elements.
            strips: the bytes that they are of a tensor, cast to torch's `dtype`, in order.
            use: called with a piece's strip and its bytes, which are valid during the call.
        """
        torch: Any = sys.modules["torch"]
        kind, at = getattr(torch, dtype), 0
        pieces: list[tuple[int, Strip]] = []
        for strip in strips:
            for piece in cut(strip, PIECE_BYTES):
                pieces.append((at, piece))
                at += piece.nbytes
        if flat.device.type != "cuda":
            return self._use(flat, kind, pieces, use)
        if self._bounce is None:
            self._bounce = torch.empty(_BOUNCE_BYTES, dtype=torch.uint8, pin_memory=True)
        total = 0
        with torch.cuda.device(flat.device):
            for group in _grouped(pieces, _BOUNCE_BYTES):
                begin, end = group[0][0], group[-1][0] + group[-1][1].nbytes
                here = self._bounce[: end - begin].view(kind)
                here.copy_(flat[begin // kind.itemsize : end // kind.itemsize].to(kind))
                total += self._use(here, kind, [(at - begin, piece) for at, piece in group], use)
        return total

    def _use(self, flat: Any, kind: Any, pieces: Sequence[tuple[int, Strip]], use: Use) -> int:
        torch: Any = sys.modules["torch"]

        def work(group: Sequence[tuple[int, Strip]]) -> int:
            total = 0
            for at, piece in group:
                some = flat[at // kind.itemsize : (at + piece.nbytes) // kind.itemsize].to(device="cpu", dtype=kind)
                total += use(piece, some.view(torch.uint8).numpy())
            return total

        groups = list(_grouped(pieces, _TASK_BYTES))
        return work(groups[0]) if len(groups) == 1 else _ended([self._pool.submit(work, each) for each in groups])


def _grouped(pieces: Sequence[tuple[int, Strip]], most: int) -> Iterator[list[tuple[int, Strip]]]:
    """Pieces that follow each other, of at most so many bytes together."""
    group: list[tuple[int, Strip]] = []
    for at, piece in pieces:
        if group and at + piece.nbytes - group[0][0] > most:
            yield group
            group = []
        group.append((at, piece))
    if group:
        yield group


def _ended(tasks: "list[Future[int]]") -> int:
    """Wait for all tasks, also after one fails; then raise its error, or add up what they return."""
    try:
        wait(tasks, return_when=FIRST_EXCEPTION)
    finally:
        begun = [task for task in tasks if not task.cancel()]
        wait(begun)
    return sum(task.result() for task in begun)


# All ranks have written and synced the files. They are opened anew to be digested: on a network file system that is
# what makes another host's bytes visible. So the manifest describes the bytes that are there.


def digested(path: Path) -> tuple[ManifestFile, dict[str, int]]:
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
        self._source: tuple[SourceReading, PublishCall] | None = None
        self._holdings: dict[str, Holding] = {}
        self._staging = folder
        self._claims: list[Claim] = []
        self._task: orders.RankTask | None = None
        self._task_claims: list[Claim] | None = None
        self._parts: tuple[orders.RankTask, list[SentPart]] | None = None

    def open(self, weights: Any, call: PublishCall) -> orders.Opening | orders.SourceOpening | orders.FailedReply:
        """Begin a publication: list what this rank holds, or say what its source does."""
        try:
            if not is_source(weights):
                return self._opened(weights, call)
            self._source = reading, _ = reading_of(weights), call
            return orders.SourceOpening(word=reading.word)
        except Exception as error:
            return orders.FailedReply(error=portable(error))

    @property
    def source(self) -> tuple[SourceReading, PublishCall]:
        """The source that this rank was passed, and the call. Raises PublishError: it was passed none."""
        if self._source is None:
            raise PublishError("this rank was asked for a source of weights, and was passed none")
        return self._source

    def _opened(self, weights: Any, call: PublishCall) -> orders.Opening:
        self._holdings = self._listed.read(weights, call.sharded or {})
        self._claims = [holding.claim for holding in self._holdings.values()]
        is_known = self._task is not None and self._claims == self._task_claims
        return orders.Opening(
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

    def _place(self) -> TrainerPlace:
        tensors = [each.tensor for each in self._holdings.values() if each.tensor.numel()]
        return place_of_process(tensors, count=len(tensors), is_rank=True)

    def answer(self, order: orders.RankOrder) -> orders.RankReply:
        """Carry an order out. A failure is an answer, too, because rank 0 waits for one."""
        try:
            match order:
                case orders.SourceOrder():
                    reading, call = self.source
                    return self._opened(reading.kept(order.share), call)
                case orders.CopyOrder():
                    task, folder = self._take(order.task), self._folder / order.staging
                    scans = self._slot.copy(folder, task, self._claims, self._holdings, scanned=order.fingerprints)
                    return orders.CopiedReply(scans=scans)
                case orders.BlocksOrder():
                    return orders.BlocksReply(digests=self._slot.digests())
                case orders.WriteOrder() | orders.DigestOrder():
                    return self._write(order) if isinstance(order, orders.WriteOrder) else self._digest(order)
                case orders.LendOrder():
                    return self.export.lend(order, self._parts_of(order.task), self._holdings)
                case orders.SendOrder() | orders.EndOrder():
                    return self.export.carry_out(order)
                case orders.KeepOrder():
                    return self.shadow.keep(order.number, self._parts_of(order.task), self._holdings)
                case orders.CompareOrder() | orders.GatherOrder():
                    return self.shadow.answer(order, self._holdings)
        except Exception as error:
            return orders.FailedReply(error=portable(error))

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
        self._source, self._holdings = None, {}

    def _take(self, task: orders.RankTask | None) -> orders.RankTask:
        """The task of an order, which may be that of the last time."""
        if task is not None:
            self._task, self._task_claims = task, self._claims
        if self._task is None:
            raise PublishError("this rank was asked to write before it was told what")
        return self._task

    def _parts_of(self, task: orders.RankTask | None) -> list[SentPart]:
        """The parts of the task of an order: the very same list for the same task."""
        task = self._take(task)
        if self._parts is None or self._parts[0] is not task:
            self._parts = task, sent_parts(task.parts, self._claims)
        return self._parts[1]

    def _write(self, order: orders.WriteOrder) -> orders.DoneReply:
        parts, task = self._parts_of(order.task), self._take(None)
        self._staging = self._folder / order.staging
        with ExitStack() as stack:
            files = [_open(stack, self._staging / name) for name in task.files]
            for part in parts:
                where = task.locations[part.entry.name]
                self._write_part(part, files[where.file], where.offset)
            for number in sorted({task.locations[part.entry.name].file for part in parts}):
                durable.sync(files[number])  # each rank its own: another host's writes are in that host's memory
        return orders.DoneReply()

    def _write_part(self, part: SentPart, fd: int, offset: int) -> None:
        dtype, holding = part.entry.dtype, self._holdings[part.entry.name]

        def use(strip: Strip, data: NDArray[np.uint8]) -> int:
            if self._options.check_finite and any_nonfinite(dtype, data):
                return count_nonfinite(dtype, data)
            for row in range(strip.rows):
                piece = data.data[row * strip.width : (row + 1) * strip.width]
                durable.write_at(fd, piece, offset + strip.begin + row * strip.pitch)
            return 0

        bad = self._reader.read(flat_part(holding, part.part), part.strips, holding.claim.dtype, use)
        if bad:
            raise not_finite_here(part.entry.name, bad)

    def _digest(self, order: orders.DigestOrder) -> orders.DoneReply:
        done = orders.DoneReply()
        paths = [self._staging / name for name in order.names]
        digest = fingerprinted if order.fingerprints else digested
        for path, (file, fingerprints) in zip(paths, self._reader.each(paths, digest), strict=True):
            done.files[path.name] = file
            done.fingerprints.update(fingerprints)
        return done


def _open(stack: ExitStack, path: Path) -> int:
    fd = open_plain(path, os.O_RDWR)
    stack.callback(os.close, fd)
    return fd
