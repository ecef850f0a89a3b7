"""Tensors written as the shards of a version, by several threads.

If the caller waits for the commit, each piece is checked, digested and written while it is in the processor's cache. If
it does not, the bytes go into the files first (from there on the caller may change its tensors), and are checked and
digested as they lie in the files. Tensors on GPUs go another way: `device_shards.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Event

import numpy as np
from numpy.typing import NDArray

from refitd_client.checkpoint.header import Entry
from refitd_client.contract.slot import ShardLayout
from refitd_client.lanes import in_lanes, lanes_for
from refitd_client.tensors.source import HOST, TensorSource
from refitd_client.write.device_shards import DeviceShards
from refitd_client.write.plan import PIECE, Shard, ShardChecks
from refitd_client.write.staged_file import StagedShard
from refitd_client.write.version_folder import Staging

_THREADS_FROM = 8 * 2**20  # bytes that are worth starting threads for


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShards:
    """The weights of a version as tensors.

    `check_finite` refuses NaN and infinity. With `fingerprinted` the manifest will have the tensors' fingerprints:
    computed on the GPU of those that are there, and of others from their bytes as they pass, at 1.5 GB/s a thread.
    """

    shards: Sequence[Shard]
    check_finite: bool
    fingerprinted: bool = False

    @property
    def sources(self) -> list[TensorSource]:
        """Its tensors, as they lie in the shards."""
        return [source for shard in self.shards for source in shard.sources]

    @property
    def tensors(self) -> dict[str, list[Entry]]:
        """What is in each shard."""
        return {shard.name: shard.entries for shard in self.shards}

    @property
    def size(self) -> int:
        """The bytes that the shards will take."""
        return sum(shard.size for shard in self.shards)

    @property
    def layout(self) -> list[ShardLayout]:
        """The files of a slot that fits."""
        return [ShardLayout(name=shard.name, header=shard.header, size=shard.size) for shard in self.shards]

    def write(self, staging: Staging) -> None:
        """Write the shards.

        Raises:
            InvalidWeightsError: a tensor holds a value that is not finite.
            NoSpaceError: there is no room for them.
        """
        if (from_gpus := self._begin(staging)) is not None:
            from_gpus.finish()
        else:
            self._share_out(staging, [partial(self._write_checked, staging, shard) for shard in self.shards])

    def stage(self, staging: Staging) -> Callable[[], None]:
        """Copy the tensors into the files, and return what is left to do: to check, to digest and to sync them.

        The tensors may change as soon as this returns. It raises NoSpaceError; if a tensor is not finite, it or the
        rest raises InvalidWeightsError.
        """
        if (from_gpus := self._begin(staging)) is not None:
            from_gpus.arrive()
            return from_gpus.finish
        pairs = [(shard, staging.open_shard(shard.name)) for shard in self.shards]
        self._share_out(staging, [partial(_fill, staging, shard, file, None) for shard, file in pairs])
        return partial(self._share_out, staging, [partial(self._check, staging, *pair) for pair in pairs])

    def _begin(self, staging: Staging) -> DeviceShards | None:
        """Refuse early what has no room; begin the copies of shards with tensors on GPUs, None if there are none."""
        if not staging.recycled:
            staging.require_space(self.size)
        if all(source.place == HOST for source in self.sources):
            return None
        return DeviceShards(staging, self.shards, check_finite=self.check_finite, fingerprinted=self.fingerprinted)

    def _checks(self, shard: Shard) -> ShardChecks:
        names = [source.entry.name for source in shard.sources] if self.fingerprinted else []
        return ShardChecks(shard.header, check_finite=self.check_finite, fingerprinted=names)

    def _share_out(self, staging: Staging, jobs: Sequence[Callable[[Event], None]]) -> None:
        lanes = lanes_for(len(jobs)) if self.size >= _THREADS_FROM else 1
        in_lanes(jobs, lanes=lanes, idle=staging.meter.report if staging.meter.is_watched else None)

    def _write_checked(self, staging: Staging, shard: Shard, stop: Event) -> None:
        file, checks = staging.open_shard(shard.name), self._checks(shard)
        _fill(staging, shard, file, checks, stop)
        staging.fingerprints.update(checks.fingerprints)
        staging.seal(file, shard.size, checks.digest)

    def _check(self, staging: Staging, shard: Shard, file: StagedShard, stop: Event) -> None:
        """Check and digest a shard that was filled."""
        checks = self._checks(shard)
        for offset, source in shard.placed:
            for begin in range(0, source.entry.nbytes, PIECE):
                if stop.is_set():
                    return
                piece = file.get(offset + begin, min(PIECE, source.entry.nbytes - begin))
                checks.add(source.entry, begin, piece)
        staging.fingerprints.update(checks.fingerprints)
        staging.seal(file, shard.size, checks.digest)


def _fill(staging: Staging, shard: Shard, file: StagedShard, checks: ShardChecks | None, stop: Event) -> None:
    """Write all of a shard, checking it on the way."""
    # The header into a slot as well, though it should be there: a slot's bytes mean nothing.
    file.put(0, np.frombuffer(shard.header, dtype=np.uint8))
    staging.meter.add(len(shard.header))
    for offset, source in shard.placed:
        for begin, piece in _pieces(source.read(), stop):
            file.put(offset + begin, piece)  # first: it fetches the piece from memory faster than a check does
            if checks is not None:
                checks.add(source.entry, begin, piece)
            staging.meter.add(len(piece))


def _pieces(data: NDArray[np.uint8], stop: Event) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    for begin in range(0, len(data), PIECE):
        if stop.is_set():
            raise InterruptedError("another part of this publication has failed")
        yield begin, data[begin : begin + PIECE]
