"""What a manifest claims, held against the folder that it lies in: files, sizes and tensors. Pure.

Digests are held against it in `validate`, once the bytes were read.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from refitd_client.checkpoint.fault import Code, Fault, shown
from refitd_client.checkpoint.opening import FileStat, counts
from refitd_client.checkpoint.strict_header import Header
from refitd_client.contract.manifest import Manifest, TensorsSummary
from refitd_client.contract.naming import MANIFEST_NAME

MAX_BESIDE_BYTES = 2**30  # of a configuration or a tokenizer. Every byte is read, also of a hole in a sparse file


def check_manifest(
    manifest: Manifest, listing: Mapping[str, FileStat], headers: Mapping[str, Header]
) -> Iterator[Fault]:
    """Say where the folder is not what the manifest says."""
    yield from check_files(manifest, listing)
    for name in manifest.files.keys() - headers.keys():
        if name in listing and listing[name].size > MAX_BESIDE_BYTES:
            size = listing[name].size
            yield _mismatch(f"{shown(name)} has {size} bytes; beside weights at most {MAX_BESIDE_BYTES} are read")
    yield from _check_summary(manifest.tensors, headers)


def check_files(manifest: Manifest, listing: Mapping[str, FileStat]) -> Iterator[Fault]:
    """Say where files and sizes are not what the manifest says. Others may lie there, but none that counts."""
    for name, file in manifest.files.items():
        found = listing.get(name)
        if found is None:
            yield Fault(Code.MISSING_FILE, f"{shown(name)} is named by {MANIFEST_NAME} and is not in the folder")
        elif not found.is_regular:
            yield Fault(Code.NOT_REGULAR, f"{shown(name)} is a {found.noun}, not a regular file")
        elif found.size != file.size:
            yield _mismatch(f"{shown(name)} has {found.size} bytes, and {MANIFEST_NAME} says {file.size}")
    for name in listing:
        if counts(name) and name != MANIFEST_NAME and name not in manifest.files:
            yield _mismatch(f"{shown(name)} is not in {MANIFEST_NAME}")


def _check_summary(claim: TensorsSummary, headers: Mapping[str, Header]) -> Iterator[Fault]:
    specs = [spec for header in headers.values() for spec in header.tensors.values()]
    found = TensorsSummary(
        count=len(specs),
        bytes=sum(spec.end - spec.start for spec in specs),
        dtypes=dict(Counter(spec.dtype for spec in specs)),
    )
    if found != claim:
        yield _mismatch(f"the files hold {_sum(found)}, and {MANIFEST_NAME} says {_sum(claim)}")


def _sum(tensors: TensorsSummary) -> str:
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in sorted(tensors.dtypes.items()))
    return f"{tensors.count} tensors of {tensors.bytes} bytes ({dtypes})"


def _mismatch(what: str) -> Fault:
    return Fault(Code.MANIFEST_MISMATCH, f"{what}: nothing may change after publishing; publish the step again")
