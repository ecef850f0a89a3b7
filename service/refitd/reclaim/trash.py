"""The trash: the only code in the project that deletes.

Deleting has two halves. `discard` moves a folder out of its place by one rename into `<root>/.refitd/trash/<unique>/`,
so that no reader finds half a version. `empty` deletes what lies in the trash later, and also after a crash. No path is
looked up twice: folders are walked by handle, links are unlinked and never followed.

    discard   trash/<unique>/                             made, 0700
              <place>  →  trash/<unique>/caught-…         the rename may have moved another folder, swapped in just now
              is it the folder that was examined?         if not, it is put back
              does it hold what it held then?             if not, it is put back as well
              caught-…  →  <another unique name>          checked: condemned
              fsync                                       no power cut brings half a version back to its place
    empty     deletes all but a `caught-…` that is not what its name says

`caught-<inode>-<seal>` names what was examined: the folder's number, and what lay at its top. A folder that holds
files of others as well stays in its place: `discard_files` moves the version's files out of it one by one, each as a
`caught-<inode>-<stamp>` that is checked in the same way.

A full disk has no room for `<unique>/`, and it is reclaim that makes room: then folders go into the trash itself.

A kill between the rename and the check therefore deletes nothing that was not examined. Subfolders are moved up into
`<unique>/` before they are emptied: a tree of any depth needs two handles and no recursion, and the kernel itself
refuses to move a mount point (EBUSY).

A later look tells by stamp and seal whether a folder is still what was looked at. A stamp sums up a file or folder: its
number, kind, size and time of change. A seal sums up a folder: the stamps of all that lies at its top. Both are
hexadecimal, and can stand in a file's name. The room of a file is what it takes on disk: holes take none. No link is
followed.
"""

import errno
import os
import re
import stat
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from uuid import uuid4

import xxhash

from refitd.policy.holdings import FolderEntry
from refitd.root.handle import Identity, below, identity_of, made, opened, parts_below
from refitd.root.scan import Discarded, Emptied, Gone, Refused, sentence
from refitd_client.contract.naming import SERVICE_FOLDER, TRASH
from refitd_client.errors import NO_SPACE
from refitd_client.files.durable import STAT_BLOCK

MAX_NAMES = 100_000  # at the top of a folder
MAX_COUNTED = 10_000  # names in the folders within one folder; what lies beyond them is not counted
_MAX_DEPTH = 16


def entries_of(folder: int) -> dict[str, FolderEntry]:
    """Everything at the top of an open folder, hidden names too; links as links. Raises OSError, also above
    `MAX_NAMES`.
    """
    found: dict[str, FolderEntry] = {}
    with os.scandir(folder) as listing:
        for entry in listing:
            if len(found) == MAX_NAMES:
                raise OSError(errno.E2BIG, f"it has more than {MAX_NAMES:,} names")
            with suppress(FileNotFoundError):  # removed since it was listed
                status = os.stat(entry.name, dir_fd=folder, follow_symlinks=False)
                is_file = stat.S_ISREG(status.st_mode)
                found[entry.name] = FolderEntry(stamp=stamp_of(status), bytes=room_of(status), is_file=is_file)
    return found


def stamp_of(status: os.stat_result) -> str:
    facts = (status.st_ino, stat.S_IFMT(status.st_mode))
    changing = (status.st_size, status.st_mtime_ns) if not stat.S_ISDIR(status.st_mode) else ()
    return xxhash.xxh3_64_hexdigest(repr(facts + changing).encode())


def seal_of(entries: Mapping[str, FolderEntry]) -> str:
    hasher = xxhash.xxh3_64()
    for name, entry in sorted(entries.items()):
        hasher.update(f"{name}\0{entry.stamp}\n".encode(errors="surrogateescape"))
    return hasher.hexdigest()


def room_of(status: os.stat_result) -> int:
    """The bytes that a file takes. Folders, links and devices count as nothing."""
    return min(status.st_size, status.st_blocks * STAT_BLOCK) if stat.S_ISREG(status.st_mode) else 0


def room_within(parent: int, name: str, left: list[int], depth: int = _MAX_DEPTH) -> int:
    """The bytes that the files in a folder take. What cannot be read counts as nothing.

    Args:
        left: how many more names are counted; shared by the calls of one look.
    """
    total = 0
    with suppress(OSError), opened(name, parent) as folder, os.scandir(folder) as listing:
        for entry in listing:
            left[0] -= 1
            if left[0] < 0:
                break
            with suppress(FileNotFoundError):
                total += room_of(entry.stat(follow_symlinks=False))
            if depth and entry.is_dir(follow_symlinks=False):
                total += room_within(folder, entry.name, left, depth - 1)
    return total


CAUGHT = "caught-"
_UNIQUE = re.compile(r"[0-9a-f]{32}")
_CAUGHT = re.compile(rf"{CAUGHT}(\d+)(?:-([0-9a-f]{{16}}))?")
_GLANCE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW


def examine(root: int, path: str) -> Identity | Gone | Refused:
    """Which folder lies at `path` now: `discard` moves that one and no other. Changes nothing."""
    parts = parts_below(path)
    if parts is None:
        return Refused(path, f"{path!r} is not a path under the root: only what lies there is ever deleted")
    try:
        with below(root, parts[:-1]) as parent, _glanced(parts[-1], parent) as folder:
            found = identity_of(os.fstat(folder))
    except FileNotFoundError:
        return _gone(root, path)
    except OSError as error:
        return Refused(path, sentence(path, error))
    if found.device != os.fstat(root).st_dev:
        return Refused(path, sentence(path, OSError(errno.EXDEV, "")))
    return found


def discard(root: int, path: str, expected: Identity, seal: str | None = None) -> Discarded | Gone | Refused:
    """Move the folder at `path` into the trash if it is the one that was examined. Blocks for a few disk syncs.

    Args:
        expected: which folder was examined.
        seal: what lay at its top then; None where that does not matter.
    """
    parts = parts_below(path)
    if parts is None:
        return Refused(path, f"{path!r} is not a path under the root: only what lies there is ever deleted")
    try:
        with below(root, parts[:-1]) as parent:
            return _take(root, parent, path, expected, seal)
    except FileNotFoundError:
        found = examine(root, path)
        if isinstance(found, Identity):  # still in its place: it is the trash that vanished
            return Refused(path, f"the trash vanished while {path} was moved there")
        return found
    except OSError as error:
        return Refused(path, sentence(path, error))


def discard_files(root: int, path: str, expected: Identity, files: Mapping[str, str]) -> Discarded | Gone | Refused:
    """Move files out of the folder at `path` into the trash, if they are those that were examined. Nothing else moves.

    Args:
        expected: which folder was examined.
        files: the names of the files and their stamps, in the order in which they go.
    """
    try:
        with below(root, parts_below(path) or ("",)) as folder, _opened_trash(root) as trash:
            if identity_of(os.fstat(folder)) != expected:
                return Refused(path, f"{path} is not the folder that was examined: another was put in its place")
            with _box(uuid4().hex, trash) as box:
                for name, stamp in files.items():
                    if (refusal := _take_file(folder, box, f"{path}/{name}", stamp)) is not None:
                        return Refused(path, refusal)
                for handle in (folder, box, trash):
                    sync(handle)
    except FileNotFoundError:
        return _gone(root, path)
    except OSError as error:
        return Refused(path, sentence(path, error))
    return Discarded(path)


def room(root: int) -> tuple[int, int]:
    """The bytes in the trash: those that are going to be deleted, and those that are not this service's to delete."""
    ours = others = 0
    with suppress(FileNotFoundError), below(root, (SERVICE_FOLDER, TRASH)) as trash:
        left = [MAX_COUNTED]
        for name in os.listdir(trash):
            with suppress(FileNotFoundError):
                size = room_of(os.stat(name, dir_fd=trash, follow_symlinks=False)) + room_within(trash, name, left)
                mine = _is_condemned(trash, name)
                ours, others = (ours + size, others) if mine else (ours, others + size)
    return ours, others


def empty(root: int, stopped: Callable[[], bool] = lambda: False) -> Emptied:
    """Delete what lies in the trash, also what a killed sweep left there. `stopped` is asked before each deletion."""
    folders, left = 0, list[str]()
    try:
        with below(root, (SERVICE_FOLDER, TRASH)) as trash:
            for name in sorted(os.listdir(trash)):
                problems = _empty_one(trash, name, stopped)
                left += problems
                folders += not problems
    except FileNotFoundError:
        return Emptied(folders, tuple(left))
    except OSError as error:
        left.append(sentence(f"{SERVICE_FOLDER}/{TRASH}", error))
    return Emptied(folders, tuple(left))


def empty_one(root: int, name: str) -> None:
    """Delete what `condemn` has moved into the trash, and nothing else: a slot may be in the making there."""
    with suppress(OSError), below(root, (SERVICE_FOLDER, TRASH)) as trash:
        _empty_one(trash, name, lambda: False)


def condemn(root: int, parent: int, name: str) -> str:
    """Move an entry of one of the service's own folders into the trash, of whatever kind; return its name there."""
    with _opened_trash(root) as trash:
        unique = uuid4().hex
        os.rename(name, unique, src_dir_fd=parent, dst_dir_fd=trash)
        for handle in (trash, parent):
            sync(handle)
    return unique


def _take(root: int, parent: int, path: str, expected: Identity, seal: str | None) -> Discarded | Refused:
    name = path.rpartition("/")[2]
    # The handle is held until the end: the inode number cannot be given to a new folder in between.
    with _glanced(name, parent) as examined, _opened_trash(root) as trash:
        if identity_of(os.fstat(examined)) != expected:
            return Refused(path, f"{path} is not the folder that was examined: another was put in its place")
        unique = uuid4().hex
        with _box(unique, trash) as folder:
            caught = f"{CAUGHT}{expected.inode}" + (f"-{seal}" if seal is not None else "")
            os.rename(name, caught, src_dir_fd=parent, dst_dir_fd=folder)
            there = os.stat(caught, dir_fd=folder, follow_symlinks=False)
            if identity_of(there) != expected:
                return Refused(path, _put_back(parent, path, folder, f"{unique}/{caught}", "was swapped"))
            if not _is_as_named(folder, caught):
                return Refused(path, _put_back(parent, path, folder, f"{unique}/{caught}", "was changed"))
            condemned = uuid4().hex
            os.rename(caught, condemned, src_dir_fd=folder, dst_dir_fd=folder)
            for handle in (parent, folder, trash):
                sync(handle)
            boxed = identity_of(os.fstat(folder)) != identity_of(os.fstat(trash))
    return Discarded(path, f"{unique}/{condemned}" if boxed else condemned)


def _take_file(folder: int, box: int, path: str, stamp: str) -> str | None:
    """Move one file of a folder into a box; return why not, where it is not what was examined."""
    name = path.rpartition("/")[2]
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stamp_of(status) != stamp:
            return f"{path} was changed since it was looked at: it is left alone"
        caught = f"{CAUGHT}{status.st_ino}-{stamp}"
        os.rename(name, caught, src_dir_fd=folder, dst_dir_fd=box)
    except FileNotFoundError:
        return None  # it is gone already
    return None if _is_as_named(box, caught) else _put_back(folder, path, box, caught, "was swapped")


def _is_as_named(folder: int, caught: str) -> bool:
    """Whether a `caught-…` is what its name says. A folder that cannot be read is not."""
    named = _CAUGHT.fullmatch(caught)
    status = os.stat(caught, dir_fd=folder, follow_symlinks=False)
    if named is None or int(named[1]) != status.st_ino:
        return False
    if named[2] is None:
        return True
    if not stat.S_ISDIR(status.st_mode):
        return stamp_of(status) == named[2]
    with suppress(OSError), opened(caught, folder) as tree:
        return seal_of(entries_of(tree)) == named[2]
    return False


@contextmanager
def _box(name: str, trash: int) -> Generator[int, None, None]:
    """A handle on a new folder in the trash; on the trash itself where there is no room for one."""
    try:
        os.mkdir(name, 0o700, dir_fd=trash)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        yield trash
        return
    with opened(name, trash) as folder:
        yield folder


def _put_back(parent: int, path: str, folder: int, caught: str, what: str) -> str:
    name = path.rpartition("/")[2]
    try:
        os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        os.rename(caught.rpartition("/")[2], name, src_dir_fd=folder, dst_dir_fd=parent)
        sync(parent)
        return f"{path} {what} while it was moved; what was found was put back"
    where = f"{SERVICE_FOLDER}/{TRASH}/{caught}"
    return (
        f"{path} {what} while it was moved, and its place was taken; what was moved lies in {where} and is not deleted"
    )


def _is_condemned(trash: int, name: str) -> bool:
    if name.startswith(CAUGHT):
        return _is_as_named(trash, name)
    if not _UNIQUE.fullmatch(name):
        return False
    with suppress(OSError), opened(name, trash) as box:
        return all(_is_as_named(box, each) for each in os.listdir(box) if each.startswith(CAUGHT))
    return True


def _empty_one(trash: int, name: str, stopped: Callable[[], bool]) -> list[str]:
    where = f"{SERVICE_FOLDER}/{TRASH}/{name}"
    try:
        if name.startswith(CAUGHT):
            if not _is_as_named(trash, name):
                return [_mistaken(where)]
            name = _condemned(trash, name)
        if not _UNIQUE.fullmatch(name):
            return [f"{where} was not put there by this service: it is not deleted"]
        try:
            with opened(name, trash) as folder:
                problems = _clear(folder, where, stopped)
        except NotADirectoryError:
            os.unlink(name, dir_fd=trash)
            return []
        if not problems:
            os.rmdir(name, dir_fd=trash)
    except FileNotFoundError:
        return []
    except OSError as error:
        return [sentence(where, error)]
    return problems


def _condemned(folder: int, caught: str) -> str:
    """Give a `caught-…` that is what its name says another name: from here on it is deleted bit by bit."""
    name = uuid4().hex
    os.rename(caught, name, src_dir_fd=folder, dst_dir_fd=folder)
    return name


def _mistaken(where: str) -> str:
    return f"{where} was moved by mistake when its place was swapped: move it back, it is never deleted"


def _clear(folder: int, where: str, stopped: Callable[[], bool]) -> list[str]:
    """Delete everything in a trash folder; each round deletes one level of what the last round moved up."""
    left: dict[str, list[str]] = {}
    while names := [name for name in os.listdir(folder) if name not in left]:
        for name in names:
            if stopped():
                return [f"{where} is emptied the next time: the service was told to stop"]
            if problems := _clear_one(folder, name, f"{where}/{name}", stopped):
                left[name] = problems
    return [problem for problems in left.values() for problem in problems]


def _clear_one(folder: int, name: str, where: str, stopped: Callable[[], bool]) -> list[str]:
    try:
        if name.startswith(CAUGHT):
            if not _is_as_named(folder, name):
                return [_mistaken(where)]
            _condemned(folder, name)
            return []  # the next round deletes it
        try:
            with opened(name, folder) as tree:
                problems = _strip(tree, folder, where, stopped)
        except NotADirectoryError:
            os.unlink(name, dir_fd=folder)
            return []
        if not problems:
            os.rmdir(name, dir_fd=folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        return [sentence(where, error)]
    return problems


def _strip(tree: int, folder: int, where: str, stopped: Callable[[], bool]) -> list[str]:
    """Unlink what lies in `tree`, and move its subfolders up into `folder`."""
    if os.fstat(tree).st_dev != os.fstat(folder).st_dev:
        return [sentence(where, OSError(errno.EXDEV, ""))]
    problems: list[str] = []
    with os.scandir(tree) as listing:
        entries = list(listing)
    for entry in entries:
        if stopped():
            return [f"{where} is emptied the next time: the service was told to stop"]
        try:
            _remove(entry, tree, folder)
        except FileNotFoundError:
            continue
        except OSError as error:
            problems.append(sentence(f"{where}/{entry.name}", error))
    return problems


def _remove(entry: os.DirEntry[str], tree: int, folder: int) -> None:
    if not entry.is_dir(follow_symlinks=False):
        os.unlink(entry.name, dir_fd=tree)
        return
    try:
        os.rmdir(entry.name, dir_fd=tree)
    except OSError as error:
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
            raise
        os.rename(entry.name, uuid4().hex, src_dir_fd=tree, dst_dir_fd=folder)


@contextmanager
def _glanced(name: str, parent: int) -> Generator[int, None, None]:
    """A handle that names a folder and needs no right to read it."""
    handle = os.open(name, _GLANCE, dir_fd=parent)
    try:
        yield handle
    finally:
        os.close(handle)


@contextmanager
def _opened_trash(root: int) -> Generator[int, None, None]:
    with made(SERVICE_FOLDER, root, 0o755) as own, made(TRASH, own, 0o700) as trash:
        if os.fstat(trash).st_mode & 0o077:
            os.fchmod(trash, 0o700)  # another program made it; raises, and so refuses, where it is another user's
        yield trash


def _gone(root: int, path: str) -> Gone | Refused:
    """A file system that was unmounted looks empty. The service's own folder tells the two apart."""
    try:
        os.stat(SERVICE_FOLDER, dir_fd=root, follow_symlinks=False)
    except FileNotFoundError:
        return Refused(path, f"{path} is not there, and neither is {SERVICE_FOLDER}: the root may be unmounted")
    return Gone(path)


def sync(folder: int) -> None:
    """Have the names in a folder on stable storage when this returns."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot sync folders
            raise
