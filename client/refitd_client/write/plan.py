"""Tensors as the shards of a version: which file holds which, and where. Pure.

model-00001-of-00002.safetensors, model-00002-of-00002.safetensors, model.safetensors.index.json
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from refitd_client.checkpoint import header
from refitd_client.checkpoint.header import Entry
from refitd_client.errors import InvalidWeightsError
from refitd_client.tensors.source import TensorSource

# Digests and page faults of one file are one thread's work: that many files keep that many processors busy.
_FILES = 16
_LEAST_SHARD, _MOST_SHARD = 64 * 10**6, 5 * 10**9


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


def cut(sources: Sequence[TensorSource], *, max_shard_bytes: int | None) -> list[Shard]:
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
    return [_shard(name, sorted(part, key=_file_order)) for name, part in zip(names, parts, strict=True)]


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
