"""Tensors as the shards of a version: cut by size, checked, digested and written by several threads.

model-00001-of-00002.safetensors, model-00002-of-00002.safetensors, model.safetensors.index.json

Two ways. Where the caller waits for the commit, and the tensors are in host memory, each chunk is checked, digested and
written while it is in the processor's cache. Else the bytes go into the files first (from there on the caller may
change its tensors), and are checked and digested as they lie in the files.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Event

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from refitd_client import header
from refitd_client.contract.slot import ShardLayout
from refitd_client.cuda import DeviceCopies
from refitd_client.errors import InvalidWeightsError
from refitd_client.finite import any_nonfinite, count_nonfinite
from refitd_client.header import Entry
from refitd_client.lanes import in_lanes, lanes_for
from refitd_client.staging import StagedShard, Staging
from refitd_client.tensors import HOST, TensorSource, refused

# Small enough to be in the processor's cache for the check, the digest and the copy into the page cache.
_CHUNK = 2**19
_THREADS_FROM = 8 * 2**20  # bytes that are worth starting threads for
# Digests and page faults of one file are one thread's work: that many files keep that many processors busy.
_FILES = 16
_LEAST_SHARD, _MOST_SHARD = 64 * 10**6, 5 * 10**9

Rest = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One file: its name, the bytes before the tensors, and the tensors as they lie in it."""

    name: str
    header: bytes
    sources: Sequence[TensorSource]

    @property
    def entries(self) -> list[Entry]:
        """Its tensors, without their bytes."""
        return [source.entry for source in self.sources]

    @property
    def size(self) -> int:
        """Its bytes."""
        return len(self.header) + sum(source.entry.nbytes for source in self.sources)

    @property
    def placed(self) -> Iterator[tuple[int, TensorSource]]:
        """Its tensors, each with the offset of its first byte in the file."""
        offset = len(self.header)
        for source in self.sources:
            yield offset, source
            offset += source.entry.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShards:
    """The weights of a version as tensors. `check_finite` refuses NaN and infinity."""

    shards: Sequence[Shard]
    check_finite: bool

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
        """What a slot has to look like for them."""
        return [ShardLayout(name=shard.name, header=shard.header, size=shard.size) for shard in self.shards]

    def write(self, staging: Staging) -> None:
        """Write the shards.

        Raises:
            InvalidWeightsError: a tensor holds a value that is not finite.
            NoSpaceError: there is no room for them.
        """
        if self._has_cuda:
            self._stage(staging, wait=False)()
        else:
            self._require_space(staging)
            self._share_out(staging, [partial(self._write_through, staging, shard) for shard in self.shards])

    def stage(self, staging: Staging) -> Rest:
        """Copy the tensors into the files, and return what is left to do: to check, to digest and to sync them.

        The tensors may change as soon as this returns. It raises NoSpaceError, the rest InvalidWeightsError.
        """
        return self._stage(staging, wait=True)

    def _stage(self, staging: Staging, *, wait: bool) -> Rest:
        self._require_space(staging)
        pairs = [(shard, staging.open_shard(shard.name)) for shard in self.shards]
        if not self._has_cuda:
            self._share_out(staging, [partial(_fill, staging, shard, file) for shard, file in pairs])
            return partial(self._share_out, staging, [partial(self._seal, staging, *pair, _nothing) for pair in pairs])
        copies = DeviceCopies()
        try:
            arrivals = [_fill_from_devices(copies, staging, shard, file) for shard, file in pairs]
        except BaseException:
            copies.synchronize()  # they write into the slot, which goes away now
            raise
        if wait:
            copies.synchronize()
        jobs = [partial(self._seal, staging, *pair, there) for pair, there in zip(pairs, arrivals, strict=True)]
        return partial(self._finish_copies, copies, staging, jobs)

    @property
    def _has_cuda(self) -> bool:
        return any(source.place != HOST for shard in self.shards for source in shard.sources)

    def _finish_copies(self, copies: DeviceCopies, staging: Staging, jobs: Sequence[Callable[[Event], None]]) -> None:
        try:
            self._share_out(staging, jobs)
        finally:
            copies.synchronize()

    def _require_space(self, staging: Staging) -> None:
        if not staging.recycled:
            staging.require_space(self.size)

    def _share_out(self, staging: Staging, jobs: Sequence[Callable[[Event], None]]) -> None:
        lanes = lanes_for(len(jobs)) if self.size >= _THREADS_FROM else 1
        in_lanes(jobs, lanes=lanes, idle=staging.meter.tell if staging.meter.is_watched else None)

    def _write_through(self, staging: Staging, shard: Shard, stop: Event) -> None:
        file, hasher = staging.open_shard(shard.name), xxhash.xxh3_128(shard.header)
        _put_header(staging, shard, file)
        for offset, source in shard.placed:
            data = source.read()
            for begin, chunk in _chunks(data, stop):
                file.put(offset + begin, chunk)  # first: it fetches the chunk from memory faster than a check does
                self._check(source.entry, chunk, data)
                hasher.update(chunk.data)
                staging.meter.add(len(chunk))
        staging.seal(file, shard.size, f"xxh3:{hasher.hexdigest()}")

    def _seal(self, staging: Staging, shard: Shard, file: StagedShard, arrived: Rest, stop: Event) -> None:
        arrived()
        hasher = xxhash.xxh3_128(shard.header)
        for offset, source in shard.placed:
            for begin in range(0, source.entry.nbytes, _CHUNK):
                if stop.is_set():
                    return
                chunk = file.get(offset + begin, min(_CHUNK, source.entry.nbytes - begin))
                self._check(source.entry, chunk, chunk)
                hasher.update(chunk.data)
        staging.seal(file, shard.size, f"xxh3:{hasher.hexdigest()}")

    def _check(self, entry: Entry, chunk: NDArray[np.uint8], data: NDArray[np.uint8]) -> None:
        if self.check_finite and any_nonfinite(entry.dtype, chunk):
            raise _not_finite(entry, data)


def cut(sources: Sequence[TensorSource], *, max_shard_bytes: int | None, check_finite: bool) -> TensorShards:
    """Cut tensors into shards of at most `max_shard_bytes`, in the order given. A larger tensor has one to itself.

    None makes about 16 shards, of 64 MB to 5 GB each.

    Raises:
        InvalidWeightsError: there are none, or too many for a shard.
    """
    if max_shard_bytes is None:
        total = sum(source.entry.nbytes for source in sources)
        max_shard_bytes = min(max(-(-total // _FILES), _LEAST_SHARD), _MOST_SHARD)
    parts: list[list[TensorSource]] = []
    room = 0
    for source in sources:
        if not parts or source.entry.nbytes > room:
            parts.append([])
            room = max_shard_bytes
        parts[-1].append(source)
        room -= source.entry.nbytes
    if not parts:
        raise InvalidWeightsError("there are no tensors to publish: the state dict is empty")
    names = (f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1))
    shards = [_shard(name, sorted(part, key=_file_order)) for name, part in zip(names, parts, strict=True)]
    return TensorShards(shards=shards, check_finite=check_finite)


def index_json(shards: Mapping[str, Sequence[Entry]]) -> bytes:
    """The index: which tensor is in which shard, as Hugging Face's loaders and SGLang's read it."""
    weight_map = {entry.name: name for name, entries in shards.items() for entry in entries}
    total = sum(entry.nbytes for entries in shards.values() for entry in entries)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return msgspec.json.format(msgspec.json.encode(index), indent=2)


def _shard(name: str, sources: Sequence[TensorSource]) -> Shard:
    return Shard(name=name, header=header.encode(source.entry for source in sources), sources=sources)


def _file_order(source: TensorSource) -> tuple[int, str]:
    return header.file_order(source.entry)


def _nothing() -> None:
    """There is nothing to wait for."""


def _put_header(staging: Staging, shard: Shard, file: StagedShard) -> None:
    """Into a slot as well, though it should be there: a slot's bytes mean nothing."""
    file.put(0, np.frombuffer(shard.header, dtype=np.uint8))
    staging.meter.add(len(shard.header))


def _fill(staging: Staging, shard: Shard, file: StagedShard, stop: Event) -> None:
    _put_header(staging, shard, file)
    for offset, source in shard.placed:
        _fill_one(staging, file, offset, source, stop)


def _fill_one(staging: Staging, file: StagedShard, offset: int, source: TensorSource, stop: Event) -> None:
    for begin, chunk in _chunks(source.read(), stop):
        file.put(offset + begin, chunk)
        staging.meter.add(len(chunk))


def _fill_from_devices(copies: DeviceCopies, staging: Staging, shard: Shard, file: StagedShard) -> Rest:
    """Begin the copies of a shard. What is returned waits until they have arrived."""
    _put_header(staging, shard, file)
    for offset, source in shard.placed:
        if source.place == HOST:
            _fill_one(staging, file, offset, source, Event())
        else:
            copies.copy(source, file, offset)
            staging.meter.add(source.entry.nbytes)
    return copies.mark()


def _chunks(data: NDArray[np.uint8], stop: Event) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    for begin in range(0, len(data), _CHUNK):
        if stop.is_set():
            raise InterruptedError("another part of this publication has failed")
        yield begin, data[begin : begin + _CHUNK]


def _not_finite(entry: Entry, data: NDArray[np.uint8]) -> InvalidWeightsError:
    chunks = (data[begin : begin + _CHUNK] for begin in range(0, len(data), _CHUNK))
    count = sum(count_nonfinite(entry.dtype, chunk) for chunk in chunks)
    return refused(
        entry.name,
        f"holds {count} values that are NaN or infinite: the training step that made it went wrong, and engines would "
        "answer with noise (check_finite=False publishes it all the same)",
    )
