"""Makes a copy: the whole model of a delta, in a folder of its own.

files          each a reflink of its source, where the file system can, else written; what is read is held against the
               digests that are known of it
deltas         written into the shards, one after the other
fingerprints   of all that lies there now, held against those that the deltas promise

Only the service that has proved a copy believes it, and forgets it when it ends. So nothing is synced here, and what a
kill leaves is worthless.

Everything is opened by handle, and no link is followed. A copy holds shards and what engines read beside them, and of a
file's mode it takes only who may read it: what else a trainer puts into its folder, and bits such as setuid, are not
carried into files of the service.

Files are read and written in large pieces, because each call of numpy, of xxhash and of the system waits for Python's
lock afterwards: with 512 KiB 16 threads did little but wait. They are read and written by calls and not mapped: on file
systems that write elsewhere a full disk is an error then, and no SIGBUS that ends the service.
"""

import os
import stat
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event

import numpy as np
from numpy.typing import NDArray

from refitd.policy.materialize import Copy, MakeCopy
from refitd.root.handle import below, made, root_at
from refitd.state.version import VersionRecord
from refitd_client.checkpoint.header import BITS, Entry, Header, HeaderRefusedError, read_header
from refitd_client.checkpoint.opening import ChangedError, Folder, OpeningRefusedError, listing_of, signature_of
from refitd_client.contract.manifest import FileDigest
from refitd_client.contract.naming import DELTA_NAME, MANIFEST_NAME
from refitd_client.delta import DeltaFile, DeltaRefusedError, check_fits
from refitd_client.errors import NO_SPACE
from refitd_client.files.durable import clone, write_at
from refitd_client.files.plain_file import NotPlainError, fill, open_plain
from refitd_client.fingerprint import bits_of, to_text, width_of
from refitd_client.lanes import in_lanes, lanes_for
from refitd_client.validation.contents import ReadingStoppedError, read_contents
from refitd_client.validation.examine import glance, structure
from refitd_client.write.content import is_companion

PIECE = 2**24  # bytes
SPARE_BYTES = 16 * 2**20  # left free on a disk that others write to as well
_MODE = 0o664  # all that a copy's file can have: it is no program, and only the service and its group write it


class CopyError(Exception):
    """A copy could not be written, and is worth nothing. The message is a sentence."""


class MisfitError(CopyError):
    """The result is not what the deltas promise, or they do not fit."""


class SourceChangedError(CopyError):
    """What the copy is made from is not what was checked."""


def write_copy(root: Path, run: int, copy: Copy, order: MakeCopy, stop: Event) -> Copy:
    """Make a copy at a path that is new, and return it with what is known of its files now. `run`: a handle on the
    folder of the run's copies.

    Raises:
        CopyError: it was not written, or not well.
        ReadingStoppedError: `stop` was set. OSError: something cannot be read or written.
    """
    try:
        with made(copy.name, run, 0o755) as folder:
            with _source(root, order.source) as source:
                headers = _copied(source, folder, _known_digests(root, order.source), stop)
            expected: dict[str, int] = {}
            for record in order.deltas:
                with _opened(root, record) as (delta, promised):
                    _check_fits(delta, headers, record)
                    apply_delta(folder, headers, delta, stop)
                    expected |= promised
            digests = _proved(root, copy.path, headers, expected, order.target, stop)
            signature, size = look(folder)
            return copy.proved(order.target.digest or "", signature, size, digests)
    except MemoryError as error:
        raise CopyError("there is not the memory to write a copy: give the service more") from error
    except OSError as error:
        if error.errno in NO_SPACE:
            raise CopyError(f"there was no room to write a copy to its end: {error.strerror}") from error
        raise


def look(folder: int) -> tuple[str, int]:
    listing = listing_of(folder)
    return signature_of(folder, listing), sum(file.size for file in listing.values())


@contextmanager
def _source(root: Path, source: Copy | VersionRecord) -> Generator[int]:
    def check() -> None:
        if look(folder)[0] != source.signature:
            raise SourceChangedError(f"the files in {source.path} are not those that were checked")

    with root_at(root) as top, below(top, tuple(source.path.split("/"))) as folder:
        check()
        yield folder
        check()  # a trainer may have written there meanwhile


def _known_digests(root: Path, source: Copy | VersionRecord) -> Mapping[str, str]:
    """The digests of a source's files, as far as they are known: a version's by its manifest."""
    if isinstance(source, Copy):
        return source.digests
    manifest = glance(root, source.path).manifest
    return {} if manifest is None else {name: file.digest for name, file in manifest.files.items()}


def _copied(source: int, folder: int, known: Mapping[str, str], stop: Event) -> dict[str, Header]:
    """Copy the files of an open folder, several at a time, and return the headers of the shards.

    The manifest is left out, which is of one version only, and what engines do not read.

    Raises:
        SourceChangedError: it is no checkpoint (any more), or was damaged since it was checked.
        CopyError: there is no room for them.
    """
    headers: dict[str, Header] = {}
    sizes: dict[str, int] = {}
    for name in sorted(os.listdir(source)):
        is_shard = name.endswith(".safetensors") and not name.startswith(".")
        if not is_shard and (name == MANIFEST_NAME or not is_companion(name)):
            continue
        with _reading(source, name) as fd:
            sizes[name] = os.fstat(fd).st_size
            if is_shard:
                try:
                    headers[name] = read_header(fd, sizes[name])
                except HeaderRefusedError as error:
                    raise SourceChangedError(f"{name}: {error}") from error
    if not headers:
        raise SourceChangedError("there are no shards to write from")
    needed, disk = sum(sizes.values()), os.fstatvfs(folder)
    room = disk.f_bavail * disk.f_frsize
    if needed + SPARE_BYTES > room:
        raise CopyError(f"there is no room for a copy: it takes {needed:,} bytes, and {room:,} are free: make room")

    def copy(name: str, failed: Event) -> None:
        memory = np.empty(PIECE, np.uint8)
        with _reading(source, name) as fd, _writing(folder, name, fd) as target:
            digest = copy_file(fd, target, sizes[name], memory, lambda: stop.is_set() or failed.is_set())
            if known.get(name, digest) != digest:
                raise SourceChangedError(f"{name} is not what it was when it was checked")

    in_lanes([partial(copy, name) for name in sizes], lanes=lanes_for(len(sizes)))
    return headers


def copy_file(source: int, target: int, size: int, memory: NDArray[np.uint8], stopped: Callable[[], bool]) -> str:
    """Copy a file, as a reflink where the file system can, and return the digest of what was read. `memory`: to read
    to. `stopped` is asked between pieces whether to end.

    Raises:
        ReadingStoppedError: it was to end.
    """
    digest, is_cloned = FileDigest(), clone(source, target)
    for at in range(0, size, len(memory)):
        if stopped():
            raise ReadingStoppedError
        data = memory[: min(len(memory), size - at)].data
        fill(source, data, at)
        digest.update(data)
        if not is_cloned:
            write_at(target, data, at)
    return digest.text


@contextmanager
def _opened(root: Path, record: VersionRecord) -> Generator[tuple[DeltaFile, dict[str, int]]]:
    """Open a version's delta; with it come the fingerprints that it promises, as far as it names them."""
    seen = structure(root, record.path)
    if seen.signature != record.signature or seen.manifest is None:
        raise CopyError(f"the files of {record.id} are not those that were checked")
    promised = {name: int(text, 16) for name, text in seen.manifest.fingerprints.items()}
    try:
        with Folder(root, record.path) as folder, folder.open(DELTA_NAME, seen.files[DELTA_NAME]) as fd:
            delta = DeltaFile(fd)
            delta.check_digest()
            yield delta, {name: int(row.result, 16) for name, row in delta.head.rows.items()} | promised
    except (DeltaRefusedError, ChangedError, OpeningRefusedError) as error:
        raise CopyError(f"the changes of {record.id} cannot be used any more: {error}") from error


def _check_fits(delta: DeltaFile, headers: Mapping[str, Header], record: VersionRecord) -> None:
    entries = {
        name: Entry(name=name, dtype=spec.dtype, shape=spec.shape)
        for header in headers.values()
        for name, spec in header.tensors.items()
        if spec.dtype in BITS
    }
    try:
        check_fits({name: (row.dtype, row.shape) for name, row in delta.head.rows.items()}, entries)
    except DeltaRefusedError as error:
        raise MisfitError(f"{record.id} does not fit: {error}") from error


def apply_delta(folder: int, headers: Mapping[str, Header], delta: DeltaFile, stop: Event) -> None:
    """Write a delta into the shards of a folder, several at a time. `headers`: of its shards, which have the tensors
    that the delta changes.

    Raises:
        DeltaRefusedError: the delta is not what it was when it was opened.
        ReadingStoppedError: `stop` was set. OSError: a file cannot be read or written.
    """

    def change(name: str, failed: Event) -> None:
        memory, header = np.empty(PIECE, np.uint8), headers[name]
        with _writing(folder, name) as fd:
            for tensor in header.tensors.keys() & delta.head.rows.keys():
                spec = header.tensors[tensor]
                start, end, width = header.data_start + spec.start, header.data_start + spec.end, width_of(spec.dtype)
                step = len(memory) // width  # elements of a stretch
                for piece, values in delta.pieces(tensor):
                    indices = piece.astype(np.int64)
                    cuts = np.flatnonzero(np.diff(indices // step)) + 1
                    for at, new in zip(np.split(indices, cuts), np.split(values, cuts), strict=True):
                        if stop.is_set() or failed.is_set():
                            raise ReadingStoppedError
                        first = int(at[0]) // step * step
                        place = start + first * width
                        data = memory[: min(step * width, end - place)]
                        fill(fd, data.data, place)
                        bits_of(data, width)[at - first] = new
                        write_at(fd, data.data, place)

    changed = [name for name, header in headers.items() if header.tensors.keys() & delta.head.rows.keys()]
    in_lanes([partial(change, name) for name in changed], lanes=lanes_for(len(changed)))


def _proved(
    root: Path,
    path: str,
    headers: Mapping[str, Header],
    expected: Mapping[str, int],
    target: VersionRecord,
    stop: Event,
) -> Mapping[str, str]:
    """Read the shards of a copy, hold them against the fingerprints that are expected, and return their digests."""
    try:
        with Folder(root, path) as folder:
            listing = {name: file for name, file in folder.list().items() if name in headers}
            read = read_contents(folder, listing, headers, fingerprinted=True, stop=stop)
    except (ChangedError, OpeningRefusedError) as error:
        raise CopyError(f"the copy of {target.id} was changed while it was made: {error}") from error
    found = read.fingerprints
    for name, value in expected.items():
        if found.get(name) != value:
            has = "not there" if name not in found else f"of fingerprint {to_text(found[name])}"
            raise MisfitError(f"in {target.id} tensor {name} was to have fingerprint {to_text(value)}, and is {has}")
    return read.digests


@contextmanager
def _reading(folder: int, name: str) -> Generator[int]:
    try:
        fd = open_plain(name, within=folder)
    except NotPlainError as error:
        raise SourceChangedError(f"{name} is no regular file") from error
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _writing(folder: int, name: str, source: int | None = None) -> Generator[int]:
    """Give a file to write: the one that is there, or a new one with the source's readers, within the umask."""
    mode = 0o600 if source is None else stat.S_IMODE(os.fstat(source).st_mode) & _MODE | 0o600
    fd = open_plain(name, os.O_RDWR | (0 if source is None else os.O_CREAT), mode, within=folder)
    try:
        yield fd
    finally:
        os.close(fd)
