"""The files of a copy: made to fit those that they are written from, and rewritten by several threads.

A file of the right name and size is written in place: its pages are there already. Everything is opened by handle, and
no link is followed. A copy holds shards and what engines read beside them, and of a file's mode it takes only who may
read it: what else a trainer puts into its folder, and bits such as setuid, are not carried into files of the service.
"""

import os
import stat
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from typing import TypeVar

from refitd.materialize.rewrite import Room, Shard, Written, rewrite, spans_of
from refitd.materialize.trouble import NoRoomError, SourceChangedError
from refitd_client.checkpoint.strict_header import Header, HeaderRefusedError, read_header
from refitd_client.contract.digest import joined
from refitd_client.contract.naming import MANIFEST_NAME
from refitd_client.delta import DeltaFile
from refitd_client.files.plain_file import NotPlainError, open_plain
from refitd_client.validation.contents import MAX_THREADS
from refitd_client.write.source_folder import is_companion

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

SPARE_BYTES = 16 * 2**20  # left free on a disk that others write to as well
SHARD_ENDING = ".safetensors"
_MODE = 0o664  # all that a copy's file can have: it is no program, and nobody but the service and its group writes it


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What is written from: a handle on its folder, the headers of its shards, and the sizes of all its files."""

    folder: int
    headers: Mapping[str, Header]
    sizes: Mapping[str, int]


def checkpoint_in(folder: int) -> Checkpoint:
    """Look at a folder. A manifest is left out, which speaks of one version only, and so is what engines do not read.

    Raises:
        SourceChangedError: it is no checkpoint (any more).
        OSError: it cannot be read.
    """
    names = sorted(name for name in os.listdir(folder) if _is_copied(name))
    headers: dict[str, Header] = {}
    sizes: dict[str, int] = {}
    for name in names:
        with reading(folder, name) as fd:
            sizes[name] = os.fstat(fd).st_size
            if name.endswith(SHARD_ENDING):
                headers[name] = _header(fd, name, sizes[name])
    if not headers:
        raise SourceChangedError("there are no shards to write from")
    return Checkpoint(folder=folder, headers=headers, sizes=sizes)


def _is_copied(name: str) -> bool:
    is_shard = name.endswith(SHARD_ENDING) and not name.startswith(".")
    return is_shard or (is_companion(name) and name != MANIFEST_NAME)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """The digests of shards before and after, by name, and by how much the fingerprints of tensors moved."""

    before: Mapping[str, str]
    after: Mapping[str, str]
    moved: Mapping[str, int]


def clean(source: Checkpoint, folder: int) -> None:
    """Take away files that no copy has, and modes that none has: an earlier refitd copied all that a version's folder
    held, as it was.
    """
    for name in os.listdir(folder):
        if name not in source.sizes:
            os.unlink(name, dir_fd=folder)
            continue
        with reading(folder, name) as fd:
            if (mode := stat.S_IMODE(os.fstat(fd).st_mode)) & ~_MODE:
                os.fchmod(fd, mode & _MODE)


def fit(source: Checkpoint, folder: int) -> None:
    """Take away what does not fit, and see that there is room for what is made anew.

    Raises:
        NoRoomError: there is not.
    """
    for name in os.listdir(folder):
        if not _fits(folder, name, source.sizes.get(name)):
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


def rewrite_all(source: Checkpoint, folder: int, deltas: Sequence[DeltaFile], stop: Event) -> Rewritten:
    """Write all shards with deltas applied. `folder` may be the source's own.

    Raises:
        ReadingStoppedError: `stop` was set.
        OSError: a file cannot be read or written.
    """
    room = Room()

    def one(span: tuple[str, range], stop: Event) -> Written:
        name, blocks = span
        with reading(source.folder, name) as fd, writing(folder, name, fd) as target:
            place = target if source.folder == folder else fd
            shard = Shard(source=place, target=target, size=source.sizes[name], header=source.headers[name])
            return rewrite(shard, blocks, deltas, room, stop)

    spans = [(name, blocks) for name in source.headers for blocks in spans_of(source.sizes[name], source.headers[name])]
    spans.sort(key=lambda span: span[1].start)  # a file takes one writer at a time: neighbours are of different files
    parts = in_threads(one, spans, stop)
    return _together(list(zip((name for name, _ in spans), parts, strict=True)))


def copy_others(source: Checkpoint, folder: int, stop: Event) -> None:
    """Copy what holds no tensors: index, configuration, tokenizer. Raises as `rewrite_all`."""
    others = {name: size for name, size in source.sizes.items() if name not in source.headers}
    headers = {name: Header({}, size, {}) for name, size in others.items()}
    rewrite_all(Checkpoint(folder=source.folder, headers=headers, sizes=others), folder, (), stop)


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
        return list(_results(pool.map(one, items), either))


@contextmanager
def reading(folder: int, name: str) -> Generator[int]:
    """A descriptor of a regular file."""
    try:
        fd = open_plain(name, within=folder)
    except NotPlainError as error:
        raise SourceChangedError(f"{name} is no regular file") from error
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def writing(folder: int, name: str, source: int) -> Generator[int]:
    """The file to write: the one that is there, or a new one that those may read who may read the source, as far as the
    umask lets them.
    """
    mode = stat.S_IMODE(os.fstat(source).st_mode) & _MODE | 0o600
    fd = open_plain(name, os.O_RDWR | os.O_CREAT, mode, within=folder)
    try:
        yield fd
    finally:
        os.close(fd)


def _header(fd: int, name: str, size: int) -> Header:
    try:
        return read_header(fd, size)
    except HeaderRefusedError as error:
        raise SourceChangedError(f"{name}: {error}") from error


def _fits(folder: int, name: str, size: int | None) -> bool:
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_size == size


def _threads(items: int) -> int:
    return max(1, min(len(os.sched_getaffinity(0)), MAX_THREADS, items))


def _together(parts: Sequence[tuple[str, Written]]) -> Rewritten:
    """What came of spans, each shard's in order."""
    before, after, moved = dict[str, list[bytes]](), dict[str, list[bytes]](), Counter[str]()
    for name, part in parts:
        before.setdefault(name, []).extend(part.before)
        after.setdefault(name, []).extend(part.after)
        moved.update(part.moved)
    return Rewritten(
        before={name: joined(blocks) for name, blocks in before.items()},
        after={name: joined(blocks) for name, blocks in after.items()},
        moved=moved,
    )


class _Either(Event):
    """Set when it is, or when another is."""

    def __init__(self, other: Event) -> None:
        super().__init__()
        self._other = other

    def is_set(self) -> bool:
        """See `Event`."""
        return super().is_set() or self._other.is_set()


def _results(parts: Iterator[ResultT], failed: Event) -> Iterator[ResultT]:
    try:
        yield from parts
    except BaseException:
        failed.set()  # nobody waits for the others to read to their end
        raise
