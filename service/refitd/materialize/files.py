"""The files of a copy, written by several threads.

Where the file system can, a file begins as a reflink of its source, and only what changes is written. Everything is
opened by handle, and no link is followed. A copy holds shards and what engines read beside them, and of a file's mode
it takes only who may read it: what else a trainer puts into its folder, and bits such as setuid, are not carried into
files of the service.
"""

import os
import stat
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Event

from refitd.materialize.rewrite import Buffers, OpenFile, RewrittenFile, rewrite
from refitd_client.checkpoint.strict_header import Header, HeaderRefusedError, read_header
from refitd_client.contract.naming import MANIFEST_NAME
from refitd_client.delta import DeltaFile
from refitd_client.files.durable import clone
from refitd_client.files.plain_file import NotPlainError, open_plain
from refitd_client.lanes import in_lanes, lanes_for
from refitd_client.write.content import is_companion


class CopyError(Exception):
    """A copy could not be written, and is worth nothing. The message is a sentence."""


class MisfitError(CopyError):
    """The result is not what the deltas promise, or they do not fit."""


class NoRoomError(CopyError):
    """The disk is full."""


class SourceChangedError(CopyError):
    """What the copy is made from is not what was checked."""


SPARE_BYTES = 16 * 2**20  # left free on a disk that others write to as well
SHARD_ENDING = ".safetensors"
_MODE = 0o664  # all that a copy's file can have: it is no program, and only the service and its group write it


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFiles:
    """What a copy is written from: a handle on the folder, the headers of its shards, the sizes of all its files."""

    folder: int
    headers: Mapping[str, Header]
    sizes: Mapping[str, int]


def source_in(folder: int) -> SourceFiles:
    """Look at an open folder. The manifest is left out, which is of one version only, and what engines do not read.

    Raises:
        SourceChangedError: it is no checkpoint (any more).
        OSError: it cannot be read.
    """
    headers: dict[str, Header] = {}
    sizes: dict[str, int] = {}
    for name in sorted(os.listdir(folder)):
        is_shard = name.endswith(SHARD_ENDING) and not name.startswith(".")
        if not is_shard and (name == MANIFEST_NAME or not is_companion(name)):
            continue
        with reading(folder, name) as fd:
            sizes[name] = os.fstat(fd).st_size
            if name.endswith(SHARD_ENDING):
                try:
                    headers[name] = read_header(fd, sizes[name])
                except HeaderRefusedError as error:
                    raise SourceChangedError(f"{name}: {error}") from error
    if not headers:
        raise SourceChangedError("there are no shards to write from")
    return SourceFiles(folder=folder, headers=headers, sizes=sizes)


def check_room(source: SourceFiles, folder: int) -> None:
    """Check that there is room for a copy.

    Raises:
        NoRoomError: there is not.
    """
    needed, disk = sum(source.sizes.values()), os.fstatvfs(folder)
    room = disk.f_bavail * disk.f_frsize
    if needed + SPARE_BYTES > room:
        raise NoRoomError(f"there is no room for a copy: it takes {needed:,} bytes, and {room:,} are free: make room")


def rewrite_all(source: SourceFiles, folder: int, deltas: Sequence[DeltaFile], stop: Event) -> dict[str, RewrittenFile]:
    """Write all shards with deltas applied, several at a time; return what came of each, by name.

    Args:
        source: what is read.
        folder: where it is written; it may be the source itself.
        deltas: what is applied, in order.
        stop: ends it when it is set.

    Raises:
        ReadingStoppedError: `stop` was set.
        OSError: a file cannot be read or written.
    """
    buffers, done = Buffers(), dict[str, RewrittenFile]()

    def one(name: str, failed: Event) -> None:
        with reading(source.folder, name) as fd, _writing(folder, name, fd) as target:
            in_place = source.folder == folder or clone(fd, target)
            file = OpenFile(
                source=target if in_place else fd,
                target=target,
                size=source.sizes[name],
                header=source.headers[name],
                in_place=in_place,
            )
            done[name] = rewrite(file, deltas, buffers, lambda: stop.is_set() or failed.is_set())

    in_lanes([partial(one, name) for name in source.headers], lanes=lanes_for(len(source.headers)))
    return done


def copy_others(source: SourceFiles, folder: int, stop: Event) -> None:
    """Copy the files without tensors: index, configuration, tokenizer. Arguments and errors are those of `rewrite_all`.

    Args:
        source: what is read.
        folder: where it is written.
        stop: ends it when it is set.
    """
    others = {name: size for name, size in source.sizes.items() if name not in source.headers}
    headers = {name: Header({}, size, {}) for name, size in others.items()}
    rewrite_all(SourceFiles(folder=source.folder, headers=headers, sizes=others), folder, (), stop)


@contextmanager
def reading(folder: int, name: str) -> Generator[int]:
    """Give a descriptor of a regular file. Raises SourceChangedError where it is none."""
    try:
        fd = open_plain(name, within=folder)
    except NotPlainError as error:
        raise SourceChangedError(f"{name} is no regular file") from error
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _writing(folder: int, name: str, source: int) -> Generator[int]:
    """Give the file to write: the one that is there, or a new one with the source's readers, within the umask."""
    mode = stat.S_IMODE(os.fstat(source).st_mode) & _MODE | 0o600
    fd = open_plain(name, os.O_RDWR | os.O_CREAT, mode, within=folder)
    try:
        yield fd
    finally:
        os.close(fd)
