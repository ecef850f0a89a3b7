"""The manifest of a version whose trainer wrote none, kept by the service where the ranks of engines find it.

A trainer without refitd's SDK writes no `refit.json`. The service reads its folder and seals it. It then knows all that
a manifest says. It writes that down beside the root's records, and never in the trainer's folder:

    <root>/.refitd/manifests/<XXH3-128 of the path>.json    {"path": "run/checkpoint-10", "signature": …, "manifest": …}

It counts for the sealed files alone: those whose signature (names, sizes, times and inodes) stands in it.
"""

import errno
import os
from collections.abc import Collection, Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import msgspec
import xxhash

from refitd_client.checkpoint.opening import ChangedError
from refitd_client.contract.decoding import from_json
from refitd_client.contract.manifest import MAX_MANIFEST_BYTES, Manifest, ManifestRefusedError, parse_manifest
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.files.durable import make_folders, replace_file
from refitd_client.files.plain_file import open_folder, plain_file, read_at
from refitd_client.validation.validate import Structure

MANIFESTS = "manifests"
_MOST_BESIDE = 2**16  # bytes that path and signature may take


class _Kept(msgspec.Struct):
    path: str
    signature: str
    manifest: msgspec.Raw


def lacks_manifest(seen: Structure) -> bool:
    """Whether a folder is a full version without a manifest of its own: the service keeps one where it seals it."""
    return not seen.has_manifest and seen.adapter is None and bool(seen.headers)


def keep_manifest(root: Path, seen: Structure, manifest: Manifest) -> None:
    """Write down the manifest of a folder that has none. It is durable when this returns.

    Args:
        root: the root.
        seen: the folder, as it was read.
        manifest: what was read.

    Raises:
        OSError: it cannot be written.
    """
    folder = root / SERVICE_FOLDER / MANIFESTS
    make_folders(folder)
    kept = _Kept(seen.path, seen.signature, msgspec.Raw(manifest.to_json()))
    replace_file(folder / _name(seen.path), msgspec.json.encode(kept), by=folder / f".{uuid4().hex}")


def sign_manifest(root: Path, path: str, signature: str) -> None:
    """Have a kept manifest count for the folder as it looks now: its files are other ones with the same bytes.

    Raises:
        OSError: there is no such manifest, or it cannot be written.
    """
    kept = _read(root, path)
    folder = root / SERVICE_FOLDER / MANIFESTS
    kept.signature = signature
    replace_file(folder / _name(path), msgspec.json.encode(kept), by=folder / f".{uuid4().hex}")


def described(root: Path, seen: Structure) -> Structure:
    """The look at a folder with the service's manifest, where the folder has none and the service has sealed it.

    Args:
        root: the root.
        seen: the look.

    Raises:
        ChangedError: the files are not those that the service has sealed.
        OSError: the manifest cannot be read.
    """
    if seen.has_manifest or seen.faults:
        return seen
    try:
        kept = _read(root, seen.path)
        manifest = parse_manifest(bytes(kept.manifest))
    except FileNotFoundError:
        return seen
    except (msgspec.MsgspecError, ManifestRefusedError) as error:
        raise ChangedError(f"the service's manifest of {seen.path} does not parse: {error}") from error
    if (kept.path, kept.signature) != (seen.path, seen.signature):
        raise ChangedError(f"the files in {seen.path} are not those that the service has sealed")
    return replace(seen, manifest=manifest)


def kept_manifest(root: Path, path: str, signature: str) -> bytes:
    """The manifest that the service keeps of a folder, as it wrote it.

    Args:
        root: the root.
        path: the folder, relative to the root.
        signature: that of the folder's files as they were sealed.

    Raises:
        OSError: there is none, or none of these files.
    """
    try:
        kept = _read(root, path)
    except msgspec.MsgspecError as error:
        raise OSError(errno.EIO, f"the service's manifest of {path} does not parse: {error}") from error
    if (kept.path, kept.signature) != (path, signature):
        raise OSError(errno.ESTALE, f"the service's manifest of {path} is of other files")
    return bytes(kept.manifest)


def has_kept_manifest(root: Path, path: str) -> bool:
    """Whether the service keeps a manifest of the folder `path`, which is relative to the root."""
    return (root / SERVICE_FOLDER / MANIFESTS / _name(path)).is_file()


def forget_manifests(root: int, paths: Collection[str]) -> None:
    """Delete the manifests that the service keeps of other folders.

    Args:
        root: the root's descriptor.
        paths: the folders of all versions that may still be loaded, relative to the root.

    Raises:
        OSError: one cannot be deleted.
    """
    wanted = {_name(path) for path in paths}
    with suppress(FileNotFoundError), _folder(root) as folder:
        for name in os.listdir(folder):
            if name not in wanted:  # also what a kill has left before the rename
                os.unlink(name, dir_fd=folder)


def _read(root: Path, path: str) -> _Kept:
    with _folder(root) as folder, plain_file(_name(path), within=folder) as fd:
        return from_json(read_at(fd, min(os.fstat(fd).st_size, MAX_MANIFEST_BYTES + _MOST_BESIDE), 0), _Kept)


def _name(path: str) -> str:
    return f"{xxhash.xxh3_128_hexdigest(path.encode(errors='surrogateescape'))}.json"


@contextmanager
def _folder(root: Path | int) -> Generator[int]:
    """The folder of manifests, without following a link beneath the root."""
    top = open_folder(root, follow=True) if isinstance(root, Path) else os.dup(root)
    try:
        for part in (SERVICE_FOLDER, MANIFESTS):
            above, top = top, open_folder(part, within=top)
            os.close(above)
        yield top
    finally:
        os.close(top)
