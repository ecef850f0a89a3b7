"""Makes a copy: all of it is whole and proved before it gets its name.

.v000007-<unique>/ made          worthless until it has its name, whatever stops us
files                            in threads; each pass takes a few deltas, piece by piece
digests, fingerprints            what was read against what was known of it, and what each pass came to against what
                                 its last delta promises
note, sync of every file and of the folder
rename to v000007-<unique>, sync from here on it is the version
"""

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import msgspec

from refitd.materialize.files import (
    CopyError,
    MisfitError,
    NoRoomError,
    SourceChangedError,
    SourceFiles,
    check_room,
    copy_others,
    rewrite_all,
    source_in,
)
from refitd.materialize.rewrite import write_at
from refitd.policy.materialize import MakeCopy
from refitd.reclaim.trash import sync
from refitd.root.handle import below, made, root_at
from refitd.state.copy import MAX_NOTE_BYTES, NOTE, Copy, Note, parse_note
from refitd.state.version import VersionRecord
from refitd_client.checkpoint.header import BITS, Entry
from refitd_client.checkpoint.opening import ChangedError, Folder, OpeningRefusedError, listing_of, signature_of
from refitd_client.checkpoint.strict_header import Header
from refitd_client.contract.manifest import fitting_fingerprints
from refitd_client.contract.naming import DELTA_NAME
from refitd_client.delta import DeltaFile, DeltaRefusedError, check_fits
from refitd_client.errors import NO_SPACE
from refitd_client.files.plain_file import NotPlainError, open_plain
from refitd_client.fingerprint import to_text
from refitd_client.fingerprint.host import MASK
from refitd_client.validation.contents import ReadingStoppedError, read_contents
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
        CopyError: they are not what was checked.
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
        raise CopyError(f"the files of {record.id} are not those that were checked")
    try:
        with Folder(root, record.path) as folder, folder.open(DELTA_NAME, seen.files[DELTA_NAME]) as fd:
            delta = DeltaFile(fd)
            delta.check_digest()
            yield delta, {name: int(text, 16) for name, text in seen.manifest.fingerprints.items()}
    except (DeltaRefusedError, ChangedError, OpeningRefusedError) as error:
        raise CopyError(f"the changes of {record.id} cannot be used any more: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What is known of the contents of a checkpoint: its shards' digests and its tensors' fingerprints, by name.

    Both were taken from the bytes, or follow from such by what has changed since. Either may be empty.
    """

    digests: Mapping[str, str]
    fingerprints: Mapping[str, int]


def write_copy(root: Path, run: int, name: str, order: MakeCopy, stop: Event) -> tuple[str, int]:
    """Make a copy, and return the signature and the bytes of its files.

    Args:
        root: the root.
        run: a handle on the folder of the run's copies.
        name: the copy's; until it is whole a dot is before it.
        order: what to write, from what.
        stop: ends it when it is set.

    Raises:
        CopyError: it was not written, or not well.
        ReadingStoppedError: `stop` was set.
        OSError: something cannot be read or written.
    """
    try:
        with made(f".{name}", run, 0o755) as folder:
            proof = _written(root, folder, order, stop)
            return _named(run, folder, name, order.target, proof)
    except MemoryError as error:
        raise CopyError("there is not the memory to write a copy: give the service more") from error
    except OSError as error:
        if error.errno in NO_SPACE:
            raise NoRoomError(f"there was no room to write a copy to its end: {error.strerror}") from error
        raise


def look(folder: int) -> tuple[str, int]:
    """Return the signature of a copy's files, and their bytes."""
    listing = listing_of(folder)
    return signature_of(folder, listing), sum(file.size for file in listing.values())


def _written(root: Path, folder: int, order: MakeCopy, stop: Event) -> Proof:
    """Write the files of a copy, and return what is proved of them."""
    deltas = order.deltas
    with (
        _source(root, order.source) as source,
        open_batch(root, deltas[:DELTAS_AT_ONCE], source.headers, stop) as changes,
    ):
        check_room(source, folder)
        proof = _proof_of(root, order.source, source, stop)
        copy_others(source, folder, stop)
        proof = _pass(source, folder, changes, proof, stop)
    for first in range(DELTAS_AT_ONCE, len(deltas), DELTAS_AT_ONCE):
        here = source_in(folder)
        with open_batch(root, deltas[first : first + DELTAS_AT_ONCE], here.headers, stop) as changes:
            proof = _pass(here, folder, changes, proof, stop)
    return proof


@contextmanager
def _source(root: Path, source: Copy | VersionRecord) -> Generator[SourceFiles]:
    def check() -> None:
        if look(folder)[0] != source.signature:
            raise SourceChangedError(f"the files in {source.path} are not those that were checked")

    with root_at(root) as top, below(top, tuple(source.path.split("/"))) as folder:
        check()
        yield source_in(folder)
        check()  # a trainer may have written there meanwhile


def _proof_of(root: Path, source: Copy | VersionRecord, files: SourceFiles, stop: Event) -> Proof:
    """Return the digests and fingerprints of the source. Where fingerprints are missing, all its bytes are read."""
    if isinstance(source, Copy):
        note = read_note(files.folder)
        if note is None:
            raise SourceChangedError(f"the note of {source.path} is not there any more")
        digests, texts = note.digests, note.fingerprints
    else:
        manifest = glance(root, source.path).manifest
        digests = {} if manifest is None else {name: file.digest for name, file in manifest.files.items()}
        texts = {} if manifest is None else manifest.fingerprints
    if all(name in texts for header in files.headers.values() for name in header.tensors):
        return Proof(digests=digests, fingerprints={name: int(text, 16) for name, text in texts.items()})
    try:
        with Folder(root, source.path) as folder:
            listing = {name: file for name, file in folder.list().items() if name in files.headers}
            read = read_contents(folder, listing, files.headers, fingerprinted=True, stop=stop)
    except (ChangedError, OpeningRefusedError) as error:
        raise SourceChangedError(str(error)) from error
    return Proof(digests=digests, fingerprints=read.fingerprints)


def _pass(source: SourceFiles, folder: int, changes: DeltaBatch, proof: Proof, stop: Event) -> Proof:
    """Write all shards, and return their digests and fingerprints.

    Raises:
        SourceChangedError: the source was damaged since it was checked.
        MisfitError: the deltas do not lead to what they promise.
    """
    done = rewrite_all(source, folder, changes.deltas, stop)
    now = dict(proof.fingerprints)
    for name, file in done.items():
        if proof.digests.get(name, file.before) != file.before:
            raise SourceChangedError(
                f"{name} is not what it was when it was checked, before {changes.last} was applied to it"
            )
        for tensor, moved in file.moved.items():
            now[tensor] = (now[tensor] + moved) & MASK
    changes.check(now)
    return Proof(digests={name: file.after for name, file in done.items()}, fingerprints=now)


def read_note(folder: int) -> Note | None:
    """Read the note in a copy's folder; None where there is none that can be read."""
    try:
        handle = open_plain(NOTE, within=folder)
    except (FileNotFoundError, NotPlainError):
        return None
    try:
        return parse_note(os.pread(handle, MAX_NOTE_BYTES, 0))
    finally:
        os.close(handle)


def _named(run: int, folder: int, name: str, target: VersionRecord, proof: Proof) -> tuple[str, int]:
    """Give a copy its note and its name, and return its signature and bytes."""
    signature, size = look(folder)
    note = Note(
        digest=target.digest or "",
        signature=signature,
        digests=dict(proof.digests),
        fingerprints=fitting_fingerprints(proof.fingerprints),
    )
    handle = open_plain(NOTE, os.O_WRONLY | os.O_CREAT, 0o644, within=folder)
    try:
        write_at(handle, msgspec.json.encode(note), 0)
    finally:
        os.close(handle)
    for each in os.listdir(folder):
        handle = open_plain(each, os.O_RDWR, within=folder)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    sync(folder)
    os.rename(f".{name}", name, src_dir_fd=run, dst_dir_fd=run)
    sync(run)
    return signature, size
