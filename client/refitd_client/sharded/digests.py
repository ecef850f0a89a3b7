"""Digesting a file that all ranks have written, for the manifest."""

import os
from pathlib import Path

import numpy as np

from refitd_client.checkpoint import header
from refitd_client.contract.manifest import FileDigest, ManifestFile
from refitd_client.files.plain_file import plain_file, read_at
from refitd_client.write.plan import PIECE, ShardChecks

_DIGESTED_AT_ONCE = 2**20

# All ranks have written and synced the files. They are opened anew to be digested: on a network file system that is
# what makes another host's bytes visible. So the manifest describes the bytes that are there.


def digested(path: Path) -> tuple[ManifestFile, dict[str, int]]:
    """A file's entry in the manifest."""
    with plain_file(path) as fd:
        found, size = FileDigest(), 0
        buffer = memoryview(bytearray(_DIGESTED_AT_ONCE))
        while count := os.readv(fd, [buffer]):
            found.update(buffer[:count])
            size += count
    return ManifestFile(size=size, digest=found.text), {}


def fingerprinted(path: Path) -> tuple[ManifestFile, dict[str, int]]:
    """The same, and the fingerprint of each tensor, in one pass."""
    located = header.locate(path).values()
    entries = [entry for entry, _ in located]
    with plain_file(path) as fd:
        size = os.fstat(fd).st_size
        head = read_at(fd, size - sum(entry.nbytes for entry in entries), 0)
        proof = ShardChecks(head, check_finite=False, fingerprinted=[entry.name for entry in entries])
        for entry, offset in located:
            for begin in range(0, entry.nbytes, PIECE):
                data = read_at(fd, min(PIECE, entry.nbytes - begin), offset + begin)
                proof.add([entry], begin, np.frombuffer(data, np.uint8))
    return ManifestFile(size=size, digest=proof.digest), proof.fingerprints
