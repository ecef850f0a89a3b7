"""What is found out about a shard's bytes while they pass: that they are finite, their digest, their fingerprints."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from refitd_client.checkpoint.finite import any_nonfinite, count_nonfinite
from refitd_client.checkpoint.header import Entry
from refitd_client.contract.digest import FileDigest
from refitd_client.errors import InvalidWeightsError
from refitd_client.fingerprint import bits_of, fingerprint, width_of
from refitd_client.tensors.source import refused

PIECE = 2**20
"""Bytes that are taken at a time: few enough to be in the processor's cache for the check, the digest and the copy, and
enough for threads to be seldom in each other's way: they take turns at the interpreter between these."""


class ShardProof:
    """Takes the bytes of a shard in order, each tensor in pieces of `PIECE` bytes."""

    def __init__(self, head: bytes, *, check_finite: bool, fingerprinted: Iterable[str]) -> None:
        """`head` are the bytes before the tensors; `fingerprinted` the tensors whose fingerprints are wanted."""
        self.fingerprints = dict.fromkeys(fingerprinted, 0)
        self._digest = FileDigest()
        self._digest.update(head)
        self._check_finite = check_finite
        self._bad = 0  # elements of the tensor that is passing

    @property
    def digest(self) -> str:
        """As the manifest has it."""
        return self._digest.text

    def add(self, entry: Entry, begin: int, piece: NDArray[np.uint8]) -> None:
        """Take the bytes of a tensor from its byte `begin` on.

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
