"""Writes a copy. Its note goes first and comes back last, so that a copy is the version that it says, or nothing.

open the first deltas, see that they fit   until here the copy is what it was
unlink the note, sync of the run's folder  from here on it is worth nothing, whatever stops us
shards: read, patch, write                 in threads; each pass takes a few deltas, piece by piece
digests, fingerprints                      what was read against what was known of it, and what each pass came to
                                           against what its last delta promises
sync of every file, of the folder, of the run's folder
note: write, sync, rename, sync            from here on it is the version
"""

import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event

import msgspec

from refitd.materialize.files import (
    CopyError,
    MisfitError,
    NoRoomError,
    SourceChangedError,
    SourceFiles,
    clean,
    copy_others,
    fingerprints_of,
    fit,
    rewrite_all,
    source_in,
)
from refitd.materialize.rewrite import write_at
from refitd.reclaim.trash import sync
from refitd.root.handle import below, made, opened, root_at
from refitd.state.copy import MAX_NOTE_BYTES, NOTE_ENDING, Copy, Note, Proof, parse_note
from refitd.state.version import VersionRecord
from refitd_client.checkpoint.header import BITS, Entry
from refitd_client.checkpoint.opening import ChangedError, Folder, OpeningRefusedError, listing_of, signature_of
from refitd_client.checkpoint.strict_header import Header
from refitd_client.contract.manifest import fitting_fingerprints
from refitd_client.contract.naming import DELTA_NAME
from refitd_client.delta import DeltaFile, DeltaRefusedError, check_fits
from refitd_client.errors import NO_SPACE
from refitd_client.files.plain_file import open_plain
from refitd_client.fingerprint import to_text
from refitd_client.fingerprint.host import MASK
from refitd_client.validation.contents import ReadingStoppedError
from refitd_client.validation.examine import glance, structure

DELTAS_AT_ONCE = 4  # in one pass over the bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaBatch:
    """The open deltas of one pass, in their order, the last of version `last`.

    `expected` are the fingerprints of the tensors that they lead to, as far as they name them.
    """

    deltas: Sequence[DeltaFile]
    expected: Mapping[str, int]
    last: str

    def check(self, found: Mapping[str, int]) -> None:
        """Check the fingerprints of a copy against those that the deltas promise.

        Raises:
            MisfitError: a tensor is something else.
        """
        for name, value in self.expected.items():
            if found.get(name) != value:
                has = "not there" if name not in found else f"of fingerprint {to_text(found[name])}"
                raise MisfitError(
                    f"in {self.last} tensor {name} was to have fingerprint {to_text(value)}, and is {has}"
                )


@contextmanager
def open_batch(
    root: Path, batch: Sequence[VersionRecord], headers: Mapping[str, Header], stop: Event
) -> Generator[DeltaBatch]:
    """Open the deltas of some versions.

    Args:
        root: the root.
        batch: the versions, in order.
        headers: of the shards that the deltas are applied to.
        stop: ends it when it is set.

    Raises:
        SourceChangedError: they are not what was checked.
        MisfitError: the shards do not have the tensors that they change.
        ReadingStoppedError: `stop` was set.
        OSError: one cannot be read.
    """
    entries = {
        name: Entry(name=name, dtype=spec.dtype, shape=spec.shape)
        for header in headers.values()
        for name, spec in header.tensors.items()
        if spec.dtype in BITS
    }
    deltas: list[DeltaFile] = []
    expected: dict[str, int] = {}
    with ExitStack() as files:
        for record in batch:
            if stop.is_set():
                raise ReadingStoppedError
            delta, promised = files.enter_context(_opened(root, record))
            try:
                check_fits({name: (row.dtype, row.shape) for name, row in delta.head.rows.items()}, entries)
            except DeltaRefusedError as error:
                raise MisfitError(f"{record.id} does not fit: {error}") from error
            deltas.append(delta)
            expected |= {name: int(row.result, 16) for name, row in delta.head.rows.items()} | promised
        yield DeltaBatch(deltas=deltas, expected=expected, last=batch[-1].id)


@contextmanager
def _opened(root: Path, record: VersionRecord) -> Generator[tuple[DeltaFile, dict[str, int]]]:
    seen = structure(root, record.path)
    if seen.signature != record.signature or seen.manifest is None:
        raise SourceChangedError(f"the files of {record.id} are not those that were checked")
    try:
        with Folder(root, record.path) as folder, folder.open(DELTA_NAME, seen.files[DELTA_NAME]) as fd:
            delta = DeltaFile(fd)
            delta.check_digest()
            yield delta, {name: int(text, 16) for name, text in seen.manifest.fingerprints.items()}
    except (DeltaRefusedError, ChangedError, OpeningRefusedError) as error:
        raise SourceChangedError(f"the changes of {record.id} cannot be used any more: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyJob:
    """What to write, from what.

    Attributes:
        name: the copy that is written.
        top: the folder above the source: the root, or the folder of copies.
        source: the folder that is read, relative to `top`.
        source_copy: the name of the copy that the source is, None where it is a version.
        signature: of the source's files.
        deltas: the versions whose deltas are applied, in order.
    """

    name: str
    top: Path
    source: str
    source_copy: str | None
    signature: str | None
    deltas: tuple[VersionRecord, ...]

    @property
    def run(self) -> str:
        """The run of the source and of the deltas."""
        return self.deltas[-1].run

    @property
    def in_place(self) -> bool:
        """Whether the source is the copy itself."""
        return self.source_copy == self.name


def write_copy(root: Path, run: int, path: str, job: CopyJob, stop: Event) -> Copy:
    """Write a copy.

    Args:
        root: the root.
        run: a handle on the folder of the run's copies.
        path: where engines find the copy.
        job: what to write, from what.
        stop: ends it when it is set.

    Raises:
        CopyError: it was not written, or not well.
        ReadingStoppedError: `stop` was set.
        OSError: something cannot be read or written.
    """
    try:
        with (
            _source(job) as source,
            open_batch(root, job.deltas[:DELTAS_AT_ONCE], source.headers, stop) as changes,
        ):
            proof = _proof_of(root, run, job, source, stop)
            invalidate(run, job.name)
            with made(job.name, run, 0o755) as folder:
                if not job.in_place:
                    fit(source, folder)
                clean(source, folder)
                if not job.in_place:
                    copy_others(source, folder, stop)
                read_from = folder if job.in_place else source.folder
                proof = _pass(replace(source, folder=read_from), folder, changes, proof, stop)
        with opened(job.name, run) as folder:
            for first in range(DELTAS_AT_ONCE, len(job.deltas), DELTAS_AT_ONCE):
                here = source_in(folder)
                batch = job.deltas[first : first + DELTAS_AT_ONCE]
                with open_batch(root, batch, here.headers, stop) as changes:
                    proof = _pass(here, folder, changes, proof, stop)
            for name in os.listdir(folder):
                _sync_file(folder, name)
            sync(folder)
            sync(run)
            return _validate(run, folder, path, job, proof)
    except MemoryError as error:
        raise CopyError("there is not the memory to write a copy: give the service more") from error
    except OSError as error:
        if error.errno in NO_SPACE:
            raise NoRoomError(f"there was no room to write a copy to its end: {error.strerror}") from error
        raise


def invalidate(run: int, name: str) -> None:
    """Remove a copy's note, durably: from here on the copy is worth nothing."""
    with suppress(FileNotFoundError):
        os.unlink(name + NOTE_ENDING, dir_fd=run)
    sync(run)


def look(folder: int) -> tuple[str, int]:
    """Return the signature of a copy's files, and their bytes."""
    listing = listing_of(folder)
    return signature_of(folder, listing), sum(file.size for file in listing.values())


@contextmanager
def _source(job: CopyJob) -> Generator[SourceFiles]:
    with root_at(job.top) as top, below(top, tuple(job.source.split("/"))) as folder:
        _check(job, folder)
        yield source_in(folder)
        if not job.in_place:  # a trainer may have written there meanwhile
            _check(job, folder)


def _check(job: CopyJob, folder: int) -> None:
    if look(folder)[0] != job.signature:
        raise SourceChangedError(f"the files in {job.source} are not those that were checked")


def _proof_of(root: Path, run: int, job: CopyJob, source: SourceFiles, stop: Event) -> Proof:
    """Return the digests and fingerprints of the source. Where fingerprints are missing, all its bytes are read."""
    if job.source_copy is None:
        manifest = glance(root, job.source).manifest
        digests = {} if manifest is None else {name: file.digest for name, file in manifest.files.items()}
        texts = {} if manifest is None else manifest.fingerprints
    else:
        note = read_note(run, job.source_copy, job.run)
        if note is None:
            raise SourceChangedError(f"the note of {job.source} is not there any more")
        digests, texts = note.digests, note.fingerprints
    if all(name in texts for header in source.headers.values() for name in header.tensors):
        return Proof(digests=digests, fingerprints={name: int(text, 16) for name, text in texts.items()})
    return Proof(digests=digests, fingerprints=fingerprints_of(source, stop))


def _pass(source: SourceFiles, folder: int, changes: DeltaBatch, proof: Proof, stop: Event) -> Proof:
    """Write all shards, and return their digests and fingerprints.

    Raises:
        MisfitError: the source was damaged since it was checked, or the deltas do not lead to what they promise.
    """
    done = rewrite_all(source, folder, changes.deltas, stop)
    for name, digest in done.before.items():
        if proof.digests.get(name, digest) != digest:
            raise MisfitError(f"{name} is not what it was when it was checked, before {changes.last} was applied to it")
    now = {name: (value + done.moved.get(name, 0)) & MASK for name, value in proof.fingerprints.items()}
    changes.check(now)
    return Proof(digests=done.after, fingerprints=now)


def _sync_file(folder: int, name: str) -> None:
    handle = open_plain(name, os.O_RDWR, within=folder)
    try:
        now = time.time_ns()
        os.utime(handle, ns=(now, now))  # it looks like another file from now on, however coarse the kernel's clock is
        os.fsync(handle)
    finally:
        os.close(handle)


def read_note(folder: int, name: str, run: str) -> Note | None:
    """Read the note of a copy.

    Args:
        folder: a handle on the folder of the run's copies.
        name: the copy.
        run: the run.

    Returns:
        None where there is none that can be read.
    """
    try:
        handle = open_plain(name + NOTE_ENDING, within=folder)
    except FileNotFoundError:
        return None
    try:
        return parse_note(os.pread(handle, MAX_NOTE_BYTES, 0), run)
    finally:
        os.close(handle)


def _validate(run: int, folder: int, path: str, job: CopyJob, proof: Proof) -> Copy:
    signature, size = look(folder)
    target = job.deltas[-1]
    digest = target.digest or ""
    note = Note(
        run=target.run,
        generation=target.order.generation,
        step=target.order.step,
        digest=digest,
        bytes=size,
        signature=signature,
        digests=dict(proof.digests),
        fingerprints=fitting_fingerprints(proof.fingerprints),
    )
    temporary = f".{job.name}{NOTE_ENDING}"  # one for each copy: what a kill leaves is written over the next time
    handle = open_plain(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644, within=run)
    try:
        write_at(handle, msgspec.json.encode(note), 0)
        os.fsync(handle)
    finally:
        os.close(handle)
    os.rename(temporary, job.name + NOTE_ENDING, src_dir_fd=run, dst_dir_fd=run)
    sync(run)
    return Copy(
        run=target.run,
        name=job.name,
        path=path,
        bytes=size,
        order=target.order,
        digest=digest,
        signature=signature,
    )
