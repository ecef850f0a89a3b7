"""The files of a copy: made to fit those that they are written from, and rewritten by several threads.

A file of the right name and size is written in place: its pages are there already. Everything is opened by handle, and
no link is followed. A copy holds shards and what engines read beside them, and of a file's mode it takes only who may
read it: what else a trainer puts into its folder, and bits such as setuid, are not carried into files of the service.
"""

import os
import stat
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from refitd.materialize.rewrite import Buffers, OpenShard, RewrittenSpan, rewrite, spans_of, width_in
from refitd_client.checkpoint.strict_header import Header, HeaderRefusedError, TensorSpec, read_header
from refitd_client.contract.manifest import joined
from refitd_client.contract.naming import MANIFEST_NAME
from refitd_client.delta import DeltaFile
from refitd_client.files.plain_file import NotPlainError, fill, open_plain
from refitd_client.fingerprint import bits_of, fingerprint
from refitd_client.fingerprint.host import MASK, ROW
from refitd_client.validation.contents import MAX_THREADS, ReadingStoppedError
from refitd_client.write.content import is_companion


class CopyError(Exception):
    """A copy could not be written, and is worth nothing. The message is a sentence."""


class MisfitError(CopyError):
    """The result is not what the deltas promise, or they do not fit: another try from the same source is in vain."""


class NoRoomError(CopyError):
    """The disk is full."""


class SourceChangedError(CopyError):
    """The files that the copy is made from are not those that were checked."""


ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

SPARE_BYTES = 16 * 2**20  # left free on a disk that others write to as well
SHARD_ENDING = ".safetensors"
_MODE = 0o664  # all that a copy's file can have: it is no program, and only the service and its group write it
_CHUNK_BYTES = 4 * 2**20  # read at a time where only fingerprints are wanted


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """The digests of shards before and after, by name, and by how much the fingerprints of tensors moved."""

    before: Mapping[str, str]
    after: Mapping[str, str]
    moved: Mapping[str, int]


def clean(source: SourceFiles, folder: int) -> None:
    """Remove files and mode bits that no copy has: an earlier refitd copied all of a version's folder as it was."""
    for name in os.listdir(folder):
        if name not in source.sizes:
            os.unlink(name, dir_fd=folder)
            continue
        with reading(folder, name) as fd:
            if (mode := stat.S_IMODE(os.fstat(fd).st_mode)) & ~_MODE:
                os.fchmod(fd, mode & _MODE)


def fit(source: SourceFiles, folder: int) -> None:
    """Remove the files that cannot be written into, and check that there is room for new ones.

    Raises:
        NoRoomError: there is not.
    """
    for name in os.listdir(folder):
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        is_own = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
        if not is_own or status.st_size != source.sizes.get(name):
            os.unlink(name, dir_fd=folder)
    there = set(os.listdir(folder))
    missing = sum(size for name, size in source.sizes.items() if name not in there)
    disk = os.fstatvfs(folder)
    room = disk.f_bavail * disk.f_frsize
    if missing and missing + SPARE_BYTES > room:
        advice = "make room, or name another folder with --copies-folder"
        raise NoRoomError(
            f"there is no room for a copy: it takes {missing:,} bytes more, and {room:,} are free: {advice}"
        )


def rewrite_all(source: SourceFiles, folder: int, deltas: Sequence[DeltaFile], stop: Event) -> Rewritten:
    """Write all shards with deltas applied.

    Args:
        source: what is read.
        folder: where it is written; it may be the source's own.
        deltas: what is applied, in order.
        stop: ends it when it is set.

    Raises:
        ReadingStoppedError: `stop` was set.
        OSError: a file cannot be read or written.
    """
    buffers = Buffers()

    def one(span: tuple[str, range], stop: Event) -> RewrittenSpan:
        name, blocks = span
        with reading(source.folder, name) as fd, _writing(folder, name, fd) as target:
            place = target if source.folder == folder else fd
            shard = OpenShard(source=place, target=target, size=source.sizes[name], header=source.headers[name])
            return rewrite(shard, blocks, deltas, buffers, stop)

    spans = [(name, blocks) for name in source.headers for blocks in spans_of(source.sizes[name], source.headers[name])]
    spans.sort(key=lambda span: span[1].start)  # a file takes one writer at a time: neighbours are of different files
    before, after, moved = dict[str, list[bytes]](), dict[str, list[bytes]](), Counter[str]()
    for (name, _), part in zip(spans, in_threads(one, spans, stop), strict=True):
        before.setdefault(name, []).extend(part.before)
        after.setdefault(name, []).extend(part.after)
        moved.update(part.moved)
    return Rewritten(
        before={name: joined(blocks) for name, blocks in before.items()},
        after={name: joined(blocks) for name, blocks in after.items()},
        moved=moved,
    )


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


def fingerprints_of(source: SourceFiles, stop: Event) -> dict[str, int]:
    """Read all shards, several at a time, and return the fingerprints by the tensors' names.

    Raises:
        ReadingStoppedError: `stop` was set.
        OSError: a file cannot be read.
    """

    def one(name: str, stop: Event) -> dict[str, int]:
        header, buffer = source.headers[name], np.empty(_CHUNK_BYTES, np.uint8)
        with reading(source.folder, name) as fd:
            return {
                tensor: _fingerprint(fd, header.data_start, spec, buffer, stop)
                for tensor, spec in header.tensors.items()
            }

    parts = in_threads(one, list(source.headers), stop)
    return {name: value for part in parts for name, value in part.items()}


def _fingerprint(fd: int, data_start: int, spec: TensorSpec, buffer: NDArray[np.uint8], stop: Event) -> int:
    width = width_in(spec.dtype)
    step = _CHUNK_BYTES // (ROW * width) * ROW * width  # parts begin at whole rows
    total = 0
    for begin in range(spec.start, spec.end, step):
        if stop.is_set():
            raise ReadingStoppedError
        data = buffer[: min(step, spec.end - begin)]
        fill(fd, data.data, data_start + begin)
        total += fingerprint(bits_of(data, width), first=(begin - spec.start) // width)
    return total & MASK


def in_threads(work: Callable[[ItemT, Event], ResultT], items: Sequence[ItemT], stop: Event) -> list[ResultT]:
    """Do some work for each item, several at a time, and return the results in order.

    Args:
        work: is given an item, and an event at which it ends early.
        items: what is worked on.
        stop: when it is set, all work ends. At the first error all other work ends, too.

    Raises:
        Exception: the first that `work` raised.
    """
    either = _Either(stop)

    def one(item: ItemT) -> ResultT:
        return work(item, either)

    with ThreadPoolExecutor(_threads(len(items)), thread_name_prefix="refitd-copies") as pool:
        results = pool.map(one, items)
        try:
            return list(results)
        except BaseException:
            either.set()  # the others need not read to their end
            raise


def _threads(items: int) -> int:
    return max(1, min(len(os.sched_getaffinity(0)), MAX_THREADS, items))


class _Either(Event):
    """Set when it is, or when another is."""

    def __init__(self, other: Event) -> None:
        super().__init__()
        self._other = other

    def is_set(self) -> bool:
        """See `Event`."""
        return super().is_set() or self._other.is_set()


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
