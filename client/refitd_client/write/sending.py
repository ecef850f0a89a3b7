"""Shards whose tensors are on GPUs, on their way into the files: each block is digested when it has arrived.

    this thread      begins copies, a little ahead of the bus; has the GPUs look at the tensors, once, for NaN and
                     fingerprints; waits for both
    the bus          brings them into the files
    lanes            wait for a block, digest it; the last of a file syncs it

Lanes get a block as soon as its copies were begun: they are little faster than the bus, and never catch up with a late
start. This thread is not far ahead of the bus either (`ahead.py`). The GPUs' look, a twentieth of the copies' time,
begins when the bus has enough to do.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Event, Lock

import numpy as np

from refitd_client.checkpoint.finite import NO_RULE, rule_of
from refitd_client.contract.digest import digest_of_block, joined
from refitd_client.fingerprint import Look, begin_scan
from refitd_client.lanes import Lanes, lanes_for
from refitd_client.tensors.source import HOST, TensorSource
from refitd_client.write.ahead import Ahead
from refitd_client.write.cuda import DeviceCopies, is_direct
from refitd_client.write.dispatch import Piece, blocks, pieces
from refitd_client.write.plan import Shard
from refitd_client.write.proof import PIECE, ShardProof, not_finite
from refitd_client.write.staged_shard import StagedShard
from refitd_client.write.version_folder import Staging

Rest = Callable[[], None]

_COPIES = 32  # of small tensors, that are begun without a mark between them


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
        self.left = len(self.blocks) + len(self.here)

    @property
    def here(self) -> list[tuple[int, TensorSource]]:
        """Its tensors from host memory, and where they lie."""
        return [(offset, source) for offset, source in self.shard.placed if source.place == HOST]


class Sending:
    """The shards of one version. `finish` must be called, in any thread."""

    def __init__(self, staging: Staging, shards: Sequence[Shard], *, check_finite: bool, fingerprinted: bool) -> None:
        """Begin everything.

        Raises:
            InvalidWeightsError: a tensor on a GPU holds a value that is not finite. Nothing is written any more then.
        """
        self._staging = staging
        self._check_finite = check_finite
        self._fingerprinted = fingerprinted
        self._copies = DeviceCopies()
        self._on_gpus = [source for shard in shards for source in shard.sources if source.place != HOST]
        self._ahead = Ahead()
        self._look: Rest | None = None
        most = sum(len(blocks(shard.size)) for shard in shards)
        self._lanes = Lanes(max(1, lanes_for(most) - 1))  # a processor is left to the trainer
        try:
            for shard in shards:
                self._send(shard)
            self._lanes.close()
            self._begun_look()()
        except BaseException:
            self._abandon()
            raise

    def arrive(self) -> None:
        """Wait until the tensors may change. Where that is interrupted, nothing is written any more."""
        try:
            self._copies.synchronize()
        except BaseException:
            self._abandon()
            raise

    def finish(self) -> None:
        """Wait until the files are digested and synced. Raises what went wrong with them."""
        meter = self._staging.meter
        try:
            self._lanes.join(meter.tell if meter.is_watched else None)
        finally:
            self._copies.synchronize()

    def _abandon(self) -> None:
        """Have everything end early: what is written to goes away now."""
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
            self._send_piece(opened, piece)
            begun += 1
            if is_direct(opened):  # buffers are waited for in the end
                whole = bisect_right(ends, piece.stop)
                if whole > sent or begun == _COPIES:
                    self._sent(file, range(sent, whole), begun)
                    sent, begun = max(sent, whole), 0
        if sent < len(ends):
            self._sent(file, range(sent, len(ends)), begun)
        self._staging.meter.add(shard.size)
        for placed in file.here:
            self._lanes.add(partial(self._look_here, file, *placed))

    def _sent(self, file: _File, whole: range, begun: int) -> None:
        """So many more copies were begun, and with them those of whole blocks."""
        arrived = self._copies.mark()
        for number in whole:
            self._lanes.add(partial(self._digest, file, number, arrived))
        self._ahead.add(arrived, begun)
        if self._ahead.is_far:
            self._begun_look()
            self._ahead.wait()

    def _send_piece(self, file: StagedShard, piece: Piece) -> None:
        if piece.source.place == HOST:
            file.put(piece.offset, piece.source.read()[piece.begin : piece.end])
        else:
            self._copies.copy(piece.source, piece.begin, piece.end, file, piece.offset)

    def _begun_look(self) -> Rest:
        """Have the GPUs look at their tensors, once, while copies go on. What is returned waits for what they find."""
        if self._look is None:
            self._look = self._begin_look(self._on_gpus)
        return self._look

    def _begin_look(self, sources: Sequence[TensorSource]) -> Rest:
        if not self._check_finite and not self._fingerprinted:
            return _nothing
        scanned = begin_scan(
            Look(source.tensor(), rule_of(source.entry.dtype) if self._check_finite else NO_RULE, source.is_view)
            for source in sources
        )

        def look() -> None:
            found = scanned()
            for source, each in zip(sources, found, strict=True):
                if each.nonfinite:
                    raise not_finite(source.entry.name, each.nonfinite)
            if self._fingerprinted:
                names = (source.entry.name for source in sources)
                self._staging.fingerprints.update(zip(names, (each.fingerprint for each in found), strict=True))

        return look

    def _digest(self, file: _File, number: int, arrived: Rest, stop: Event) -> None:
        arrived()
        if not stop.is_set():
            begin, end = file.blocks[number]
            file.digests[number] = digest_of_block(file.file.get(begin, end - begin))
            self._done(file)

    def _look_here(self, file: _File, offset: int, source: TensorSource, stop: Event) -> None:
        """Check a tensor that came from host memory, as it lies in the file."""
        entry = source.entry
        proof = ShardProof(
            b"", check_finite=self._check_finite, fingerprinted=[entry.name] if self._fingerprinted else []
        )
        for begin in range(0, entry.nbytes, PIECE):
            if stop.is_set():
                return
            proof.add(entry, begin, file.file.get(offset + begin, min(PIECE, entry.nbytes - begin)))
        self._staging.fingerprints.update(proof.fingerprints)
        self._done(file)

    def _done(self, file: _File) -> None:
        """One job of a file is. The last one seals it."""
        with file.turn:
            file.left -= 1
            is_last = file.left == 0
        if is_last:
            self._staging.seal(file.file, file.shard.size, joined(file.digests))


def _nothing() -> None:
    """Nobody asked for anything."""
