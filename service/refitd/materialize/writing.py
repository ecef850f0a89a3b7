"""A copy written. Its note goes first and comes back last, so that a copy is the version that it says, or nothing.

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
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import msgspec

from refitd.materialize.changes import Changes, open_batch
from refitd.materialize.files import Checkpoint, checkpoint_in, clean, copy_others, fit, rewrite_all
from refitd.materialize.fingerprints import fingerprints_of
from refitd.materialize.rewrite import write_at
from refitd.materialize.trouble import CopyError, MisfitError, NoRoomError, SourceChangedError
from refitd.reclaim.trash import sync
from refitd.root.handle import below, made, opened, root_at
from refitd.state.copy import MAX_NOTE_BYTES, NOTE_ENDING, Copy, Note, Proof, parse_note
from refitd.state.version import VersionRecord
from refitd_client.checkpoint.opening import listing_of, signature_of
from refitd_client.contract.manifest import fitting_fingerprints
from refitd_client.errors import NO_SPACE
from refitd_client.files.plain_file import open_plain
from refitd_client.fingerprint import to_texts
from refitd_client.fingerprint.definition import MASK
from refitd_client.validation.examine import glance

DELTAS_AT_ONCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Write the copy `name` from the folder `source` beneath `top`, which looks like `signature`, with `deltas`.

    `source_copy` is the name of the copy that the source is, None where it is a version.
    """

    name: str
    top: Path
    source: str
    source_copy: str | None
    signature: str | None
    deltas: tuple[VersionRecord, ...]

    @property
    def run(self) -> str:
        """The run that all of it is of."""
        return self.deltas[-1].run

    @property
    def in_place(self) -> bool:
        """Whether the source is the copy itself."""
        return self.source_copy == self.name


def write_copy(root: Path, run: int, path: str, job: Job, stop: Event) -> Copy:
    """Write a copy. `run` is a handle on the folder of the run's copies, `path` what engines will be told.

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
                proof = _first_pass(source, folder, changes, proof, stop, in_place=job.in_place)
        with opened(job.name, run) as folder:
            proof = _further_passes(root, folder, job.deltas[DELTAS_AT_ONCE:], proof, stop)
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
    """Take a copy's note away, durably: from here on nobody believes what is in it."""
    with suppress(FileNotFoundError):
        os.unlink(name + NOTE_ENDING, dir_fd=run)
    sync(run)


def look(folder: int) -> tuple[str, int]:
    """What the files of a copy look like from outside, and their bytes."""
    listing = listing_of(folder)
    return signature_of(folder, listing), sum(file.size for file in listing.values())


@contextmanager
def _source(job: Job) -> Generator[Checkpoint]:
    with root_at(job.top) as top, below(top, tuple(job.source.split("/"))) as folder:
        _check(job, folder)
        yield checkpoint_in(folder)
        if not job.in_place:
            _check(job, folder)  # a trainer may have written there meanwhile


def _check(job: Job, folder: int) -> None:
    if look(folder)[0] != job.signature:
        raise SourceChangedError(f"the files in {job.source} are not those that were checked")


def _proof_of(root: Path, run: int, job: Job, source: Checkpoint, stop: Event) -> Proof:
    """What is known of the source. Where fingerprints are missing they are taken from its bytes."""
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


def _first_pass(
    source: Checkpoint, folder: int, changes: Changes, proof: Proof, stop: Event, *, in_place: bool
) -> Proof:
    if in_place:
        clean(source, folder)
        source = Checkpoint(folder=folder, headers=source.headers, sizes=source.sizes)
    else:
        fit(source, folder)
        clean(source, folder)
        copy_others(source, folder, stop)
    return _pass(source, folder, changes, proof, stop)


def _further_passes(root: Path, folder: int, deltas: tuple[VersionRecord, ...], proof: Proof, stop: Event) -> Proof:
    for first in range(0, len(deltas), DELTAS_AT_ONCE):
        here = checkpoint_in(folder)
        with open_batch(root, deltas[first : first + DELTAS_AT_ONCE], here.headers, stop) as changes:
            proof = _pass(here, folder, changes, proof, stop)
    return proof


def _pass(source: Checkpoint, folder: int, changes: Changes, proof: Proof, stop: Event) -> Proof:
    """Write all shards, and return what is known of them now.

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
    """The note of a copy of `run` in the folder of the run's copies, None where there is none that can be read."""
    try:
        handle = open_plain(name + NOTE_ENDING, within=folder)
    except FileNotFoundError:
        return None
    try:
        return parse_note(os.pread(handle, MAX_NOTE_BYTES, 0), run)
    finally:
        os.close(handle)


def _validate(run: int, folder: int, path: str, job: Job, proof: Proof) -> Copy:
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
        fingerprints=fitting_fingerprints(to_texts(proof.fingerprints)),
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
