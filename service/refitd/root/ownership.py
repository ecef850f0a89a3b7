"""One service owns a root and a state folder: the locks that say so, and what is checked at start.

The services of a group share a root: each has its lock as a reader has, so that no service alone takes it as well.
Which of them leads is settled in their database (`refitd_hosts/group/leadership.py`).

The journal lives on a local disk, unless the operator names another folder for it.

Which root a root is: `.refitd/id` in it holds a random name, and the journal of its service knows that name.

A file system that is not mounted leaves an ordinary, empty folder in its place, in which everything seems to be gone. A
missing or another name shows that, also at a start. Meanwhile the service believes the journal: no version counts as
lost, none is deleted, none taken in. It goes on by itself when the file system is there.

A root in memory (tmpfs) is empty after a reboot though its file system is mounted: then the versions are gone.

Which type of file system holds a folder, and whether it tells of what other hosts write.
"""

import fcntl
import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from refitd_client.contract.naming import ROOT_NAME, SERVICE_FOLDER, TRASH
from refitd_client.files.durable import replace_file
from refitd_client.files.plain_file import open_plain, read_plain, with_advice

# Types that give no events of what other hosts write, or of nothing at all.
NETWORK_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "lustre", "overlay", "fuse", "cifs", "smb3", "9p", "beegfs", "ceph"})


@dataclass(frozen=True, slots=True)
class Mount:
    """Where a file system is mounted, and its type; empty where it is not known."""

    point: str = ""
    kind: str = ""


def mounts_now() -> str:
    """What is mounted, as /proc/self/mounts says it; nothing where there is no such file."""
    with suppress(OSError):
        return Path("/proc/self/mounts").read_text()
    return ""


def mount_of(path: Path, mounts: str) -> Mount:
    """The file system that holds `path`, from the text of /proc/self/mounts."""
    best = Mount()
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        inside = point == "/" or str(path) == point or str(path).startswith(point + "/")
        if inside and len(point) >= len(best.point):
            best = Mount(point, fields[2])
    return best


def file_system_of(path: Path, mounts: str) -> str:
    """The type of the file system that holds `path`, from the text of /proc/self/mounts; "" where it is not there."""
    return mount_of(path, mounts).kind


def root_file_system(root: Path) -> str:
    """The type of the file system that holds the root now, "" where it is not known."""
    return file_system_of(root.resolve(), mounts_now())


def wants_polling(kind: str) -> bool:
    """Whether events of other hosts' writes are missing on this type of file system."""
    return kind.partition(".")[0] in NETWORK_FILE_SYSTEMS


def why_no_slots(count: int, root: Path) -> str | None:
    """Why nothing is recycled; None where it is: on file systems of this machine, where a rename arbitrates for all."""
    kind = root_file_system(root)
    if not count:
        return "slots are off (--slots 0)"
    if kind != "overlay" and wants_polling(kind):
        return f"the root is on {kind}: slots are for tmpfs and local file systems"
    return None


_MARK_BYTES = 64  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RootMark:
    """The root that a journal is about: its name, and where the file system was mounted that holds it."""

    name: str
    mount: str


def recognise(known: RootMark | None, found: str | None, here: Mount, *, has_versions: bool) -> str | None:
    """The name that the root is to have, None for a new one.

    Args:
        known: the root that the journal is about.
        found: the name that the root has now.
        here: where its file system is mounted.
        has_versions: whether the journal knows versions. One that knows none takes the root as it is.
    """
    if known is None or found == known.name or not has_versions:
        return found
    was_emptied = found is None and here.point == known.mount and here.kind in VOLATILE
    return None if was_emptied else known.name


def mark_root(root: Path, known: RootMark | None, *, has_versions: bool, mounts: str) -> RootMark | None:
    """The mark of the journal's root; a root that has none is given one. None where it cannot be written. Blocks.

    Args:
        known: the root that the journal is about.
        has_versions: whether the journal knows versions.
        mounts: the text of /proc/self/mounts.
    """
    with suppress(OSError):  # a full disk at the first start: looked at and tried again at the next
        here = mount_of(root, mounts)
        found = _read(root)
        name = recognise(known, found, here, has_versions=has_versions)
        if known is not None and name == known.name != found:
            return known  # another root: the service waits for the one that it knows
        return RootMark(name=name or _write(root), mount=here.point)
    return known


def is_taken_at_start(root: Path, known: RootMark, *, has_versions: bool, mounts: str) -> bool:
    """Whether a service that starts takes what lies at the root's path now for the root of its journal.

    Raises:
        OSError: the root's name cannot be read.
    """
    found = _read(root)
    return recognise(known, found, mount_of(root, mounts), has_versions=has_versions) in {found, None}


def _read(root: Path) -> str | None:
    try:
        return read_plain(root / SERVICE_FOLDER / ROOT_NAME, _MARK_BYTES).decode(errors="replace").strip()
    except FileNotFoundError:
        return None


def _write(root: Path) -> str:
    name = uuid4().hex
    _name(root / SERVICE_FOLDER, name)
    return name


def _name(own: Path, name: str) -> None:
    replace_file(own / ROOT_NAME, f"{name}\n".encode(), by=own / f"{ROOT_NAME}-{name}")


class RootRefusedError(Exception):
    """A folder is not taken for the root of a journal; the message says why."""


def adopt(root: Path, mark: RootMark, *, mounts: str) -> None:
    """Give a folder that has no name the name that a journal knows, at an operator's word. Blocks.

    Raises:
        RootRefusedError: it has a name of its own: that is another service's root. Or the file system is not mounted
            on which the root lay.
        OSError: it cannot be written.
    """
    own, here = root / SERVICE_FOLDER, mount_of(root, mounts).point
    if _read(root) is not None:
        raise RootRefusedError(
            f"{root} is another service's root, with a name of its own: give that service's --state, or take "
            f"{own / ROOT_NAME} away first if no service uses it any more"
        )
    if here != mark.mount:
        raise RootRefusedError(
            f"{root} lay on the file system at {mark.mount}, and lies on the one at {here} now: mount the first, or "
            f"write {mark.name} into {own / ROOT_NAME} if the root is to be here from now on"
        )
    own.mkdir(mode=0o770, exist_ok=True)
    _name(own, mark.name)


class RootGuard:
    """Says whether what lies at the root's path now is the root that the journal is about. For any thread.

    `own` locks what is there, and returns why it cannot: after an absence it may be another file system than the one
    that was locked at the start.
    """

    def __init__(self, root: Path, mark: RootMark | None = None, own: Callable[[], str | None] = lambda: None) -> None:
        self._root = root
        self._mark = mark
        self._own = own
        self._is_owned = False
        self._turn = threading.Lock()

    def __call__(self) -> str | None:
        """Why it is not, in a sentence that says what to do; None where it is."""
        with self._turn:
            fault = self._stranger() or (None if self._is_owned else self._own())
            self._is_owned = fault is None
            return fault

    def _stranger(self) -> str | None:
        own = self._root / SERVICE_FOLDER
        if self._mark is None:
            return None if own.is_dir() else f"{self._root} has lost its {SERVICE_FOLDER} folder: {_MOUNT_IT}"
        try:
            found = _read(self._root)
        except OSError as error:
            return f"{own / ROOT_NAME} cannot be read: {error.strerror}"
        if found == self._mark.name:
            return None
        what = f"has no {SERVICE_FOLDER}/{ROOT_NAME}" if found is None else "is another root"
        first = "" if found is None else f"take {own / ROOT_NAME} away, and "
        return (
            f"{self._root} {what}: {_MOUNT_IT}. Nothing is lost or deleted meanwhile. If it is the right one all the "
            f"same, or what was in it is gone for good, {first}run 'refitd doctor --repair --root {self._root}' "
            "(with the service's --state, if it has one)"
        )


_MOUNT_IT = "its file system may be unmounted; mount it, and this goes on by itself"


VOLATILE = frozenset({"tmpfs", "ramfs"})


class StartRefusedError(Exception):
    """The service cannot start; the message says why and what to do."""


class Hold:
    """The lock of a root. It goes with the process, however it ends."""

    def __init__(self, root: Path, *, shared: bool = False) -> None:
        """Lock it, `shared` with others of a group, or raise StartRefusedError or OSError."""
        self._path = root / SERVICE_FOLDER / "lock"
        self._what = f"owns {root}: stop it, or give this one a root of its own"
        self._shared = shared
        self._handle = self._lock_now()

    def _lock_now(self) -> int:
        return _locked(self._path, 0o660, self._what, shared=self._shared)

    def renew(self) -> str | None:
        """Lock what lies at the root's path now, if that is another file system than before; return why it cannot."""
        try:
            if self._path.exists() and os.path.samestat(self._path.stat(), os.fstat(self._handle)):
                return None
            handle = self._lock_now()
        except (OSError, StartRefusedError) as error:
            return f"the root cannot be locked: {error}"
        self.release()
        self._handle = handle
        return None

    def release(self) -> None:
        os.close(self._handle)


@contextmanager
def owned(root: Path, *, shared: bool = False) -> Generator[Hold]:
    """Own `root` as long as the context lasts, alone or `shared` with the other services of a group.

    Raises:
        StartRefusedError: the root is no folder, cannot be written, or another service owns it.
    """
    if not root.is_dir():
        raise StartRefusedError(f"the root {root} is no folder: create it, or name another with --root")
    folder = root / SERVICE_FOLDER
    try:
        folder.mkdir(exist_ok=True, mode=0o770)
        hold = Hold(root, shared=shared)
    except OSError as error:
        raise StartRefusedError(f"the service needs to write its folder in the root: {with_advice(error)}") from error
    with suppress(OSError):  # made while there is room: on a full disk it is what makes room
        (folder / TRASH).mkdir(exist_ok=True, mode=0o700)
    try:
        yield hold
    finally:
        hold.release()


@contextmanager
def state_owned(folder: Path) -> Generator[None]:
    """Own the state folder, too: two services of two roots would write into one journal.

    Raises:
        StartRefusedError: it cannot be made or written, or another service owns it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = _locked(folder / "lock", 0o600, f"keeps its journal in {folder}: name another folder with --state")
    except OSError as error:
        raise StartRefusedError(f"the service needs to write its state folder: {with_advice(error)}") from error
    try:
        yield
    finally:
        os.close(handle)


def _locked(path: Path, mode: int, what: str, *, shared: bool = False) -> int:
    """A handle that holds the lock in a file; raises StartRefusedError where another process holds it, or OSError."""
    handle = open_plain(path, os.O_RDWR | os.O_CREAT, mode)
    try:
        _lock(handle, what, shared=shared)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _lock(handle: int, what: str, *, shared: bool) -> None:
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.pread(handle, 64, 0).decode(errors="replace").strip() or "unknown"
        raise StartRefusedError(f"another refitd (pid {owner}) {what}") from error
    with suppress(OSError):  # on a full disk the owner's pid cannot be written: the lock holds, and reclaim makes room
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)


def check_state_folder(folder: Path, *, named: bool, mounts: str) -> None:
    """Check that a journal in `folder` would be there after a reboot. `mounts` is the text of /proc/self/mounts.

    Raises:
        StartRefusedError: it is on a tmpfs or network file system and was not named by the operator.
    """
    kind = file_system_of(folder.resolve(), mounts)
    if named or kind == "overlay":  # a container's own file system: there is no better place to choose by default
        return
    if kind in VOLATILE:
        raise StartRefusedError(
            f"the state folder {folder} is on {kind} and gone after a reboot: name one with --state"
        )
    if wants_polling(kind):
        raise StartRefusedError(
            f"the state folder {folder} is on {kind}, where SQLite is unsafe: name one with --state"
        )
