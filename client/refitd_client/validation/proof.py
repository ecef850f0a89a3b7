"""Proving a full version by its tensors' fingerprints: what the ranks of an engine do on their GPUs, and how it is held
against the manifest.

Whoever reads all of a version finds damage by the digests of its files. A rank's GPU digests no files, and computes the
fingerprint of each tensor at the speed of the bus. Together with what is read without the tensors (headers, index,
sizes, the files beside the weights) equal fingerprints prove as much: a header names each byte after it as a part of
one tensor, without gaps.

The tensor-parallel ranks of an engine share the tensors out among themselves. Each says what it found in one digest,
which the service computes from the manifest for the same tensors.
"""

from collections.abc import Iterable, Mapping

import xxhash

from refitd_client.checkpoint.strict_header import Header, is_scales
from refitd_client.contract.states import Kind
from refitd_client.validation.validate import Structure


def unprovable(seen: Structure) -> str | None:
    """Why a version cannot be proved by fingerprints, in a sentence without a subject; None where it can."""
    manifest = seen.manifest
    if manifest is None or manifest.kind is not Kind.FULL or seen.adapter is not None:
        return "is no full version of refitd's publisher"
    if manifest.fingerprints.keys() != seen.inventory.tensors.keys():
        return "has no fingerprint of each tensor in its manifest"
    if any(is_scales(name, tensor.dtype) for name, tensor in seen.inventory.tensors.items()):
        return "has scales, which have to be above 0 and not only finite"
    return None


def share_of(headers: Mapping[str, Header], rank: int, ranks: int) -> list[str]:
    """The names of the tensors that one of `ranks` ranks reads, in their order: about the same number of bytes each."""
    sizes = [(name, spec.end - spec.start) for file in sorted(headers) for name, spec in headers[file].tensors.items()]
    total, begin, found = sum(size for _, size in sizes), 0, list[str]()
    for name, size in sizes:
        if begin * ranks // max(total, 1) == rank or (begin == total > 0 and rank == ranks - 1):
            found.append(name)
        begin += size
    return found


def proof_digest(fingerprints: Mapping[str, str], names: Iterable[str]) -> str:
    """One digest of the fingerprints (16 hex digits each) of some tensors, in their order."""
    hasher = xxhash.xxh3_128()
    for name in names:
        hasher.update(f"{name}\0{fingerprints[name]}\n".encode())
    return f"xxh3:{hasher.hexdigest()}"
