"""What a rank finds out about files that all ranks have written and synced: their digests, their tensors' fingerprints.

The files are opened anew: on a network file system that is what makes another host's bytes visible. So what the
manifest says is of the bytes that are there, whoever wrote them.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from refitd_client.checkpoint import header
from refitd_client.checkpoint.header import Entry
from refitd_client.contract.digest import FileDigest
from refitd_client.contract.manifest import ManifestFile
from refitd_client.files.file_bytes import read_at
from refitd_client.files.plain_file import plain_file
from refitd_client.sharded.reading import PIECE_BYTES
from refitd_client.write.proof import PIECE, ShardProof


@dataclass(frozen=True, slots=True, kw_only=True)
class Digested:
    """What the manifest says of a file, and the fingerprints of the tensors in it where they were asked for."""

    file: ManifestFile
    fingerprints: dict[str, int] = field(default_factory=dict[str, int])


def digested(path: Path) -> Digested:
    """A file's size and digest.

    Raises:
        OSError: it cannot be read.
    """
    with plain_file(path) as fd:
        found, size = FileDigest(), 0
        buffer = memoryview(bytearray(PIECE_BYTES))
        while count := os.readv(fd, [buffer]):
            found.update(buffer[:count])
            size += count
    return Digested(file=ManifestFile(size=size, digest=found.text))


def fingerprinted(path: Path) -> Digested:
    """The same and the fingerprint of each tensor, in one pass: 1.5 GB/s of 16-bit elements.

    Raises:
        OSError: it cannot be read.
        InvalidWeightsError: it is not the file that rank 0 made.
    """
    located = header.locate(path).values()
    entries = [entry for entry, _ in located]
    with plain_file(path) as fd:
        size = os.fstat(fd).st_size
        head = read_at(fd, size - sum(entry.nbytes for entry in entries), 0)
        proof = ShardProof(head, check_finite=False, fingerprinted=[entry.name for entry in entries])
        for entry, offset in located:
            _prove(fd, entry, offset, proof)
    return Digested(file=ManifestFile(size=size, digest=proof.digest), fingerprints=proof.fingerprints)


def _prove(fd: int, entry: Entry, offset: int, proof: ShardProof) -> None:
    for begin in range(0, entry.nbytes, PIECE):
        data = read_at(fd, min(PIECE, entry.nbytes - begin), offset + begin)
        proof.add(entry, begin, np.frombuffer(data, np.uint8))
