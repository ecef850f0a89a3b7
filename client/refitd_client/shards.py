"""Tensors as the shards of a version: cut by size, each written, checked and digested in one pass.

model-00001-of-00002.safetensors, model-00002-of-00002.safetensors, model.safetensors.index.json
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from refitd_client import header
from refitd_client.errors import InvalidWeightsError
from refitd_client.finite import count_nonfinite
from refitd_client.header import Entry
from refitd_client.staging import StagedFile, Staging
from refitd_client.tensors import TensorSource, refused

# Small enough to be in the processor's cache for the check, the digest and the copy into the page cache.
_CHUNK = 2**20


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
        return sum(len(shard.header) + sum(entry.nbytes for entry in shard.entries) for shard in self.shards)

    def write(self, staging: Staging) -> None:
        """Write the shards.

        Raises:
            InvalidWeightsError: a tensor holds a value that is not finite.
            NoSpaceError: there is no room for them.
        """
        staging.require_space(self.size)
        for shard in self.shards:
            with staging.file(shard.name) as file:
                file.write(shard.header)
                for source in shard.sources:
                    _write_tensor(source, file, self.check_finite)


def cut(sources: Iterable[TensorSource], *, max_shard_bytes: int, check_finite: bool) -> TensorShards:
    """Cut tensors into shards of at most `max_shard_bytes`, in the order given. A larger tensor has one to itself.

    Raises:
        InvalidWeightsError: there are none, or too many for a shard.
    """
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


def _write_tensor(source: TensorSource, file: StagedFile, check_finite: bool) -> None:
    data = source.read()
    for begin in range(0, len(data), _CHUNK):
        chunk = data[begin : begin + _CHUNK]
        if check_finite and count_nonfinite(source.entry.dtype, chunk):
            raise _not_finite(source.entry, data)
        file.write(chunk.data)


def _not_finite(entry: Entry, data: NDArray[np.uint8]) -> InvalidWeightsError:
    chunks = (data[begin : begin + _CHUNK] for begin in range(0, len(data), _CHUNK))
    count = sum(count_nonfinite(entry.dtype, chunk) for chunk in chunks)
    values = "1 value that is" if count == 1 else f"{count} values that are"
    return refused(
        entry.name,
        f"holds {values} NaN or infinite: the training step that made it went wrong, and engines would answer with "
        "noise (check_finite=False publishes it all the same)",
    )
