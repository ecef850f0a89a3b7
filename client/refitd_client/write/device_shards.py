"""Shards whose tensors are on GPUs, copied into the files: each block is digested when it has arrived.

    this thread      begins copies, a little ahead of the bus; has the GPUs scan the tensors, once, for NaN and
                     fingerprints; waits for both
    the bus          brings them into the files
    lanes            wait for a block, digest it; the last of a file syncs it

Lanes get a block as soon as its copies were begun: they are little faster than the bus, and never catch up with a late
start. The GPUs' scan, a twentieth of the copies' time, begins when the bus has enough to do.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Event, Lock

import numpy as np

from refitd_client.checkpoint.finite import NO_RULE, rule_of
from refitd_client.contract.manifest import BLOCK, blocks, digest_of_block, joined
from refitd_client.fingerprint import begin_scan
from refitd_client.fingerprint.tensors import ScanInput
from refitd_client.lanes import Lanes, lanes_for
from refitd_client.tensors import HOST, TensorSource
from refitd_client.write.cuda import DeviceCopies, is_direct
from refitd_client.write.plan import PIECE, Shard, ShardChecks, not_finite
from refitd_client.write.version_folder import StagedShard, Staging

MOST_UNMARKED = 32  # of small tensors, that are begun without a mark between them
_MARKS_AHEAD = 40  # at 16 MiB each 12 ms of a bus of 55 GB/s
_ENTRIES_AHEAD = 160


@dataclass(frozen=True, slots=True)
class CopyPiece:
    """Bytes `begin` to `end` of a tensor, which lie from `offset` on in their file."""

    source: TensorSource
    begin: int
    end: int
    offset: int


def pieces(shard: Shard) -> Iterator[CopyPiece]:
    """A shard's tensors in the order of the file, cut where the blocks of its digest end.

    So each block is whole after some piece, and can be digested while the next ones are on their way. A tensor that
    would be made anew for each piece is never cut.
    """
    for offset, source in shard.placed:
        size = source.entry.nbytes
        begin = 0
        while begin < size:
            end = min(size, begin + BLOCK - (offset + begin) % BLOCK) if source.is_view else size
            yield CopyPiece(source, begin, end, offset + begin)
            begin = end


class CopiesAhead:
    """The copies that were begun and not waited for, in order: marks (`DeviceCopies.mark`), each behind some copies.

    A GPU's queue is not long, and a thread that adds to a full one waits in the driver: with the interpreter's lock
    (`cuda.py`), and so with every thread that digests what has arrived. So copies are begun ahead by as many as
    keep the bus busy for some milliseconds, and then their arrival is waited for, which gives up the lock.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[Callable[[], None], int]] = deque()
        self._entries = 0

    def add(self, arrived: Callable[[], None], copies: int) -> None:
        self._marks.append((arrived, copies + 1))
        self._entries += copies + 1

    @property
    def is_far(self) -> bool:
        return len(self._marks) > _MARKS_AHEAD or self._entries > _ENTRIES_AHEAD

    def wait(self) -> None:
        while self.is_far:
            arrived, entries = self._marks.popleft()
            self._entries -= entries
            arrived()


@dataclass(slots=True, kw_only=True)
class _File:
    """One file: the digests of its blocks, and how many jobs are left."""

    shard: Shard
    file: StagedShard
    blocks: Sequence[tuple[int, int]]
    digests: list[bytes] = field(init=False)
    left: int = field(init=False)
    turn: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self.digests = [b""] * len(self.blocks)
        self.left = len(self.blocks) + len(self.from_host)

    @property
    def from_host(self) -> list[tuple[int, TensorSource]]:
        return [(offset, source) for offset, source in self.shard.placed if source.place == HOST]


class DeviceShards:
    """The shards of one version. `finish` must be called, in any thread."""

    def __init__(self, staging: Staging, shards: Sequence[Shard], *, check_finite: bool, fingerprinted: bool) -> None:
        """Begin everything. Raises InvalidWeightsError if a tensor on a GPU holds a value that is not finite. Nothing
        is written any more then.
        """
        self._staging = staging
        self._check_finite = check_finite
        self._fingerprinted = fingerprinted
        self._copies = DeviceCopies()
        self._on_gpus = [source for shard in shards for source in shard.sources if source.place != HOST]
        self._ahead = CopiesAhead()
        self._scan: Callable[[], None] | None = None
        most = sum(len(blocks(shard.size)) for shard in shards)
        self._lanes = Lanes(max(1, lanes_for(most) - 1))  # a processor is left to the trainer
        try:
            for shard in shards:
                self._send(shard)
            self._lanes.close()
            self._begun_scan()()
        except BaseException:
            self._abandon()
            raise

    def arrive(self) -> None:
        """Wait until the tensors may change. If that is interrupted, nothing is written any more."""
        try:
            self._copies.synchronize()
        except BaseException:
            self._abandon()
            raise

    def finish(self) -> None:
        """Wait until the files are digested and synced. Raises what went wrong with them."""
        meter = self._staging.meter
        try:
            self._lanes.join(meter.report if meter.is_watched else None)
        finally:
            self._copies.synchronize()

    def _abandon(self) -> None:
        """Have everything end early: the files that are written to are removed now."""
        self._lanes.stop()
        with suppress(Exception):  # what went wrong first is being raised
            self._lanes.join()
        self._copies.synchronize()

    def _send(self, shard: Shard) -> None:
        """Begin the copies of a shard, and have its blocks digested in the order in which they arrive."""
        opened = self._staging.open_shard(shard.name)
        opened.put(0, np.frombuffer(shard.header, dtype=np.uint8))
        file = _File(shard=shard, file=opened, blocks=blocks(shard.size))
        ends = [end for _, end in file.blocks]
        sent = begun = 0
        for piece in pieces(shard):
            if piece.source.place == HOST:
                opened.put(piece.offset, piece.source.read()[piece.begin : piece.end])
            else:
                self._copies.copy(piece.source, piece.begin, piece.end, opened, piece.offset)
            begun += 1
            if is_direct(opened):  # buffers are waited for in the end
                complete = bisect_right(ends, piece.offset + piece.end - piece.begin)
                if complete > sent or begun == MOST_UNMARKED:
                    self._sent(file, range(sent, complete), begun)
                    sent, begun = max(sent, complete), 0
        if sent < len(ends):
            self._sent(file, range(sent, len(ends)), begun)
        self._staging.meter.add(shard.size)
        for offset, source in file.from_host:
            self._lanes.add(partial(self._check_host_tensor, file, offset, source))

    def _sent(self, file: _File, complete: range, begun: int) -> None:
        """Note that `begun` more copies were begun, and with them all of some blocks."""
        arrived = self._copies.mark()
        for number in complete:
            self._lanes.add(partial(self._digest, file, number, arrived))
        self._ahead.add(arrived, begun)
        if self._ahead.is_far:
            self._begun_scan()
            self._ahead.wait()

    def _begun_scan(self) -> Callable[[], None]:
        """Have the GPUs scan their tensors, once, while copies go on. What is returned waits for what they find."""
        if self._scan is not None:
            return self._scan
        if not self._check_finite and not self._fingerprinted:
            self._scan = lambda: None
            return self._scan
        scanned = begin_scan(
            ScanInput(source.tensor(), rule_of(source.entry.dtype) if self._check_finite else NO_RULE, source.is_view)
            for source in self._on_gpus
        )

        def wait() -> None:
            for source, found in zip(self._on_gpus, scanned(), strict=True):
                if found.nonfinite:
                    raise not_finite(source.entry.name, found.nonfinite)
                if self._fingerprinted:
                    self._staging.fingerprints[source.entry.name] = found.fingerprint

        self._scan = wait
        return wait

    def _digest(self, file: _File, number: int, arrived: Callable[[], None], stop: Event) -> None:
        arrived()
        if not stop.is_set():
            begin, end = file.blocks[number]
            file.digests[number] = digest_of_block(file.file.get(begin, end - begin))
            self._done(file)

    def _check_host_tensor(self, file: _File, offset: int, source: TensorSource, stop: Event) -> None:
        """Check a tensor that came from host memory, as it lies in the file."""
        entry = source.entry
        names = [entry.name] if self._fingerprinted else []
        checks = ShardChecks(b"", check_finite=self._check_finite, fingerprinted=names)
        for begin in range(0, entry.nbytes, PIECE):
            if stop.is_set():
                return
            checks.add([entry], begin, file.file.get(offset + begin, min(PIECE, entry.nbytes - begin)))
        self._staging.fingerprints.update(checks.fingerprints)
        self._done(file)

    def _done(self, file: _File) -> None:
        """Note the end of one job of a file. The last one seals it."""
        with file.turn:
            file.left -= 1
            is_last = file.left == 0
        if is_last:
            self._staging.seal(file.file, file.shard.size, joined(file.digests))
