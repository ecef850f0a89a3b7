"""What reclaim finds under the root, and how discarding ends.

The outcomes are values and no exceptions: a folder that is gone or in use is an expected case. `Incoming` and `Slot`
are what can lie under the root beside versions: folders that are being written, and slots.
"""

import errno
from dataclasses import dataclass, field

from refitd_client.contract.naming import slots_path


@dataclass(frozen=True, slots=True)
class Discarded:
    """It is out of its place and in the trash, `where` is its place there."""

    path: str
    where: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Gone:
    """It was not there any more, which is as good."""

    path: str


@dataclass(frozen=True, slots=True)
class Refused:
    """It was left alone; `reason` is a sentence."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Emptied:
    """How many trash folders were deleted, and sentences about what is left for the next time."""

    folders: int
    left: tuple[str, ...] = ()


def sentence(path: str, error: OSError) -> str:
    """Say what an error means for the folder at `path`, and what to do about it."""
    match error.errno:
        case errno.ENOTDIR | errno.ELOOP:
            return f"{path}, or a folder above it, is a link or no folder: links are never followed"
        case errno.EXDEV:
            return f"{path} is on another file system than the root: mount points are never crossed, delete it by hand"
        case errno.EBUSY | errno.ENOTEMPTY:
            return f"{path} is still in use (open on NFS, or a mount point): it is tried again the next time"
        case errno.EACCES | errno.EPERM:
            return f"{path} may not be deleted by this user ({error.strerror}): give its folder a shared group"
        case _:
            return f"{path} cannot be deleted now: {error.strerror}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """A folder that is, or was, being written. `age` is in seconds, `bytes` counts its files."""

    path: str
    abandoned: bool
    reason: str
    age: float | None = None
    bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A folder among a run's slots. `layout` is None where it is none; `fault` says what is wrong with it.

    `ours` says whether this service can have put it there. Without a name it is the folder of a run's slots itself,
    and without a run that of all slots: neither can be read then.
    """

    run: str
    name: str
    bytes: int = 0
    layout: str | None = None
    fault: str | None = None
    ours: bool = True

    @property
    def path(self) -> str:
        """Where it lies, relative to the root."""
        return f"{slots_path(self.run)}/{self.name}".rstrip("/")
