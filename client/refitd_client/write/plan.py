"""Tensors as the shards of a version: which file holds which, and where; and what is found out about their bytes. Pure.

model-00001-of-00002.safetensors, model-00002-of-00002.safetensors, model.safetensors.index.json
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from refitd_client.checkpoint import header
from refitd_client.checkpoint.finite import any_nonfinite, count_nonfinite
from refitd_client.checkpoint.header import Entry
from refitd_client.contract.digest import FileDigest
from refitd_client.errors import InvalidWeightsError
from refitd_client.fingerprint import bits_of, fingerprint, width_of
from refitd_client.tensors.source import TensorSource, refused

# Digests and page faults of one file are one thread's work: that many files keep that many processors busy.
_FILES = 16
_LEAST_SHARD, _MOST_SHARD = 64 * 10**6, 5 * 10**9

PIECE = 2**20
"""Bytes that `ShardChecks` takes at a time: few enough to be in the processor's cache for the check, the digest and the
copy, and enough for threads to be seldom in each other's way: they take turns at the interpreter between these."""


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
    shards: list[Shard] = []
    for number, part in enumerate(parts, 1):
        part.sort(key=lambda source: header.file_order(source.entry))
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        shards.append(Shard(name=name, header=header.encode(source.entry for source in part), sources=part))
    return shards


def index_json(shards: Mapping[str, Sequence[Entry]]) -> bytes:
    """The index: which tensor is in which shard, as Hugging Face's loaders and SGLang's read it."""
    weight_map = {entry.name: name for name, entries in shards.items() for entry in entries}
    total = sum(entry.nbytes for entries in shards.values() for entry in entries)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return msgspec.json.format(msgspec.json.encode(index), indent=2)


class ShardChecks:
    """What is found out about a shard's bytes as they pass: that they are finite, their digest, their fingerprints.

    Takes the bytes of a shard in order, each tensor in pieces of `PIECE` bytes.
    """

    def __init__(self, head: bytes, *, check_finite: bool, fingerprinted: Iterable[str]) -> None:
        """Begin a shard.

        Args:
            head: the bytes before the tensors.
            check_finite: refuse NaN and infinity.
            fingerprinted: the names of the tensors whose fingerprints are wanted.
        """
        self.fingerprints = dict.fromkeys(fingerprinted, 0)
        self._digest = FileDigest()
        self._digest.update(head)
        self._check_finite = check_finite
        self._bad = 0  # elements of the tensor that is passing

    @property
    def digest(self) -> str:
        """The digest of the bytes so far, as the manifest has it."""
        return self._digest.text

    def add(self, entry: Entry, begin: int, piece: NDArray[np.uint8]) -> None:
        """Take the bytes of tensor `entry` from its byte `begin` on.

        Raises:
            InvalidWeightsError: they were its last, it has elements that are NaN or infinite, and that is refused.
        """
        if self._check_finite and any_nonfinite(entry.dtype, piece):
            self._bad += count_nonfinite(entry.dtype, piece)
        if self._bad and begin + len(piece) == entry.nbytes:
            raise not_finite(entry.name, self._bad)
        self._digest.update(piece.data)
        if entry.name in self.fingerprints:
            width = width_of(entry.dtype)
            more = fingerprint(bits_of(piece, width), first=begin // width)
            self.fingerprints[entry.name] = (self.fingerprints[entry.name] + more) % 2**64


def not_finite(name: str, count: int) -> InvalidWeightsError:
    """The error for a tensor with so many values that are NaN or infinite."""
    values = "1 value that is" if count == 1 else f"{count} values that are"
    return refused(
        name,
        f"holds {values} NaN or infinite: the training step that made it went wrong, and engines would answer with "
        "noise (check_finite=False publishes it all the same)",
    )
