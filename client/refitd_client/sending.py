"""Shards whose tensors are on GPUs, on their way into the files: sent in chunks, each digested as it arrives.

    this thread      sends chunk after chunk, in the order of `dispatch`; then has the GPUs look at the tensors
    the bus          brings them into the files
    lanes            one a file: wait for the file's next chunk, digest it, and in the end sync the file

The tensors are read once by the GPU, which finds NaN and infinity and computes fingerprints, and the files once by the
lanes, for their digests.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event

import numpy as np

from refitd_client.cuda import DeviceCopies, is_direct
from refitd_client.dispatch import Chunk, chunks, turns
from refitd_client.fingerprint import scan
from refitd_client.finite import NO_RULE, rule_of
from refitd_client.lanes import Lanes, lanes_for
from refitd_client.proof import PIECE, ShardProof, not_finite
from refitd_client.shard import Shard
from refitd_client.staging import StagedShard, Staging
from refitd_client.tensors import HOST, TensorSource

CHUNK = 16 * 2**20
"""Bytes that are sent at a time: 0.3 ms on the bus, and few enough waits for each of them to cost nothing."""
_LOOK_SECONDS = 0.5  # who waits for a chunk looks so often whether there will be any

Rest = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """What is to be found out about the tensors."""

    finite: bool
    fingerprints: bool

    def proof(self, shard: Shard) -> ShardProof:
        """What is found out about a shard as its bytes pass on the host."""
        here = [source.entry.name for source in shard.sources if self.fingerprints and source.place == HOST]
        return ShardProof(shard.header, check_finite=self.finite, fingerprinted=here)


@dataclass(frozen=True, slots=True)
class _Line:
    """One file. What was sent of it waits in `sent`, with what waits for its arrival; None is the end."""

    shard: Shard
    file: StagedShard
    chunks: Sequence[Chunk]
    sent: "SimpleQueue[tuple[Chunk, Rest] | None]"

    def following(self, stop: Event) -> tuple[Chunk, Rest] | None:
        """Wait for the next chunk. None at the end, and when all is to stop."""
        while not stop.is_set():
            try:
                return self.sent.get(timeout=_LOOK_SECONDS)
            except Empty:
                continue
        return None


class Sending:
    """The shards of one version. After `send`, `finish` or `abandon` must be called, in any thread."""

    def __init__(self, staging: Staging, shards: Sequence[Shard], checks: Checks) -> None:
        """Open the files."""
        self._staging = staging
        self._checks = checks
        self._copies = DeviceCopies()
        self._lines = [_line(staging, shard) for shard in shards]
        self._lanes: Lanes | None = None

    def send(self) -> None:
        """Begin all copies, and the lanes; see what the tensors are.

        Raises:
            InvalidWeightsError: one on a GPU holds a value that is not finite.
        """
        try:
            count = lanes_for(len(self._lines))
            self._lanes = Lanes([partial(self._digest, line) for line in self._lines], count)
            self._send(count)
            self._look([source for line in self._lines for source in line.shard.sources if source.place != HOST])
        except BaseException:
            self.abandon()
            raise

    def arrive(self) -> None:
        """Wait until the tensors may change."""
        self._copies.synchronize()

    def finish(self) -> None:
        """Wait until the files are digested and synced. Raises what went wrong with them."""
        meter = self._staging.meter
        try:
            if self._lanes is not None:
                self._lanes.join(meter.tell if meter.is_watched else None)
        finally:
            self._copies.synchronize()

    def abandon(self) -> None:
        """Have everything end early. Nothing is written any more when this returns."""
        if self._lanes is not None:
            self._lanes.stop()
            self._end_lines()
            with suppress(Exception):  # what went wrong first is being raised
                self._lanes.join()
        self._copies.synchronize()

    def _send(self, lanes: int) -> None:
        coming = [iter(line.chunks) for line in self._lines]
        try:
            for number in turns([[chunk.size for chunk in line.chunks] for line in self._lines], lanes):
                line, chunk = self._lines[number], next(coming[number])
                self._send_chunk(line.file, chunk)
                line.sent.put((chunk, self._copies.mark()))
        finally:
            self._end_lines()

    def _send_chunk(self, file: StagedShard, chunk: Chunk) -> None:
        for piece in chunk.pieces:
            if piece.source.place == HOST:
                file.put(piece.offset, piece.source.read()[piece.begin : piece.end])
            else:
                self._copies.copy(piece.source, piece.begin, piece.end, file, piece.offset)
        self._staging.meter.add(chunk.size)

    def _end_lines(self) -> None:
        for line in self._lines:
            line.sent.put(None)

    def _look(self, sources: Sequence[TensorSource]) -> None:
        """Have the GPUs look at their tensors while the copies go on."""
        if not self._checks.finite and not self._checks.fingerprints:
            return
        rules = [rule_of(source.entry.dtype) if self._checks.finite else NO_RULE for source in sources]
        found = scan((source.tensor(), rule) for source, rule in zip(sources, rules, strict=True))
        for source, each in zip(sources, found, strict=True):
            if each.nonfinite:
                raise not_finite(source.entry.name, each.nonfinite)
        if self._checks.fingerprints:
            names = (source.entry.name for source in sources)
            self._staging.fingerprints.update(zip(names, (each.fingerprint for each in found), strict=True))

    def _digest(self, line: _Line, stop: Event) -> None:
        proof, left = self._checks.proof(line.shard), len(line.chunks)
        while (sent := line.following(stop)) is not None:
            chunk, arrived = sent
            arrived()
            if stop.is_set():
                return
            _take(line.file, chunk, proof)
            left -= 1
        if left == 0:  # else something has failed
            self._staging.seal(line.file, line.shard.size, proof)


def _line(staging: Staging, shard: Shard) -> _Line:
    file = staging.open_shard(shard.name)
    file.put(0, np.frombuffer(shard.header, dtype=np.uint8))
    staging.meter.add(len(shard.header))
    most = CHUNK if is_direct(file) else shard.size  # through buffers it goes file by file
    return _Line(shard, file, chunks(shard, most), SimpleQueue())


def _take(file: StagedShard, chunk: Chunk, proof: ShardProof) -> None:
    """Digest a chunk that has arrived; look at tensors from host memory as well."""
    if all(piece.source.place != HOST for piece in chunk.pieces):
        step = CHUNK if file.mapped is not None else PIECE
        for begin in range(chunk.begin, chunk.begin + chunk.size, step):
            proof.digest_alone(file.get(begin, min(step, chunk.begin + chunk.size - begin)))
        return
    for piece in chunk.pieces:
        for begin in range(piece.begin, piece.end, PIECE):
            data = file.get(piece.offset + begin - piece.begin, min(PIECE, piece.end - begin))
            if piece.source.place == HOST:
                proof.add(piece.source.entry, begin, data)
            else:
                proof.digest_alone(data)
