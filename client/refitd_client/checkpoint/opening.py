"""Opening files beneath the root, and nothing else.

A trainer, or any process that can write into its folder, may put a link to /etc, a FIFO or a device where a shard
belongs, and may swap it between the listing and the opening. So every component is opened from the descriptor of the
one above it, links are never followed, only regular files are opened, and what was opened must be what was listed.
"""

import errno
import os
import stat
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import xxhash

from refitd_client.checkpoint.fault import shown
from refitd_client.contract.manifest import MAX_FILES
from refitd_client.contract.naming import ADAPTER_CONFIG_NAME, DELTA_NAME, INDEX_NAME, MANIFEST_NAME
from refitd_client.files.plain_file import NotPlainError, open_folder, open_plain

CONFIG_NAME = "config.json"
_COUNT = frozenset({INDEX_NAME, MANIFEST_NAME, CONFIG_NAME, ADAPTER_CONFIG_NAME, DELTA_NAME})


class OpeningRefusedError(ValueError):
    """A path or file that is not opened: a link, no regular file, or out of the root. The message is a sentence."""


class ChangedError(Exception):
    """A file is no longer what the listing saw. The message is a sentence."""


@dataclass(frozen=True, slots=True)
class FileStat:
    """The status of a name (`lstat`): size in bytes, time of the last change in nanoseconds, inode and file type.

    `blocks` is what is allocated (`st_blocks`), which a file system may settle later: it proves no change.
    """

    size: int
    mtime_ns: int
    ino: int
    kind: int
    blocks: int = field(default=0, compare=False)

    @classmethod
    def of(cls, status: os.stat_result) -> "FileStat":
        kind = stat.S_IFMT(status.st_mode)
        return cls(status.st_size, status.st_mtime_ns, status.st_ino, kind, status.st_blocks)

    @property
    def is_regular(self) -> bool:
        return self.kind == stat.S_IFREG

    @property
    def noun(self) -> str:
        return _NOUNS.get(self.kind, "special file")


_NOUNS = {
    stat.S_IFREG: "regular file",
    stat.S_IFDIR: "folder",
    stat.S_IFLNK: "symbolic link",
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
}


def components(path: str) -> list[str]:
    """The parts of a path relative to the root. Raises OpeningRefusedError if it is absolute, empty, or leaves its
    folder.
    """
    parts = path.split("/")
    if any(part in {"", ".", ".."} or "\0" in part for part in parts):
        raise OpeningRefusedError(f"path {path!a} is not a plain path beneath the root: leave out '..', '.' and '//'")
    return parts


class Folder:
    """A version's folder, held open: what is read belongs to one folder even if its name is given to another.

    Use it as a context manager. Threads may share it.
    """

    def __init__(self, root: Path, path: str) -> None:
        """Open `root`/`path` one component at a time. `root` itself may be a link: the operator named it.

        Raises:
            OpeningRefusedError: a component is a link or no folder.
            OSError: it is not there, or cannot be opened.
        """
        part, parts = "", components(path)
        self._fd = open_folder(root, follow=True)
        try:
            for part in parts:
                above, self._fd = self._fd, open_folder(part, within=self._fd)
                os.close(above)
        except BaseException as error:
            os.close(self._fd)
            if isinstance(error, OSError) and error.errno in {errno.ENOTDIR, errno.ELOOP}:
                raise OpeningRefusedError(
                    f"path {path!a}: {part!a} is a link or no folder; links are not followed, give the folder itself"
                ) from error
            raise

    def __enter__(self) -> "Folder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    @property
    def descriptor(self) -> int:
        return self._fd

    def list(self) -> dict[str, FileStat]:
        """Everything in the folder with its status, in order of name; links as links. Hidden names are left out.

        Raises:
            OpeningRefusedError: there are more than 100,000 names.
            OSError: it cannot be listed.
        """
        return listing_of(self._fd)

    @contextmanager
    def open(self, name: str, expected: FileStat) -> Generator[int]:
        """Give a descriptor of a regular file that is still what `expected` says, and close it afterwards.

        Raises:
            OpeningRefusedError: it is no regular file.
            ChangedError: it is another file than the one listed, or gone.
            OSError: it cannot be opened.
        """
        if not expected.is_regular:  # before the opening, which can hang on a FIFO and act on a device
            raise OpeningRefusedError(
                f"{shown(name)} is a {expected.noun}, not a regular file: write a plain file there"
            )
        try:
            fd = open_plain(name, within=self._fd)
        except (FileNotFoundError, NotPlainError) as error:
            raise ChangedError(f"{shown(name)} was replaced or removed while it was read") from error
        try:
            check_unchanged(name, fd, expected)
            yield fd
        finally:
            os.close(fd)

    def signature(self, listing: Mapping[str, FileStat]) -> str:
        """A digest of the files that count (weights, index, manifest, config, changes) as seen from outside.

        Of their sizes, times and inodes, and the folder's own inode: equal while none has changed. Nothing is read, so
        it is cheap enough before each load.
        """
        return signature_of(self._fd, listing)


def listing_of(folder: int) -> dict[str, FileStat]:
    """Everything in an open folder, as `Folder.list`."""
    found: dict[str, FileStat] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue  # loaders do not read them: glob's "*" leaves them out
            if len(found) == MAX_FILES:
                raise OpeningRefusedError(f"the folder has more than {MAX_FILES} files")
            with suppress(FileNotFoundError):  # removed since it was listed: as if it had not been
                found[entry.name] = FileStat.of(os.stat(entry.name, dir_fd=folder, follow_symlinks=False))
    return dict(sorted(found.items()))


def signature_of(folder: int, listing: Mapping[str, FileStat]) -> str:
    """The signature of an open folder, as `Folder.signature`."""
    hasher = xxhash.xxh3_128(f"{os.fstat(folder).st_ino}\n".encode())
    for name, file in sorted(listing.items()):
        if counts(name):
            line = f"{name}\0{file.size}\0{file.mtime_ns}\0{file.ino}\0{file.kind}\n"
            hasher.update(line.encode(errors="surrogateescape"))
    return f"xxh3:{hasher.hexdigest()}"


def counts(name: str) -> bool:
    """Whether a change to this file changes the version: what else trainers write beside the weights may change."""
    return name.endswith(".safetensors") or name in _COUNT


def check_unchanged(name: str, fd: int, expected: FileStat) -> None:
    """Check that an open file is still what the listing saw. Raises ChangedError if it is not."""
    if FileStat.of(os.fstat(fd)) != expected:
        raise ChangedError(f"{shown(name)} changed while it was read")
