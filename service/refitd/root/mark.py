"""Which root a root is: `.refitd/id` in it holds a random name, and the journal of its service knows that name.

A file system that is not mounted leaves an ordinary, empty folder in its place, in which everything seems to be gone. A
missing or another name shows that, also at a start. Meanwhile the service believes the journal: no version counts as
lost, none is deleted, none taken in. It goes on by itself when the file system is there.

A root in memory (tmpfs) is empty after a reboot though its file system is mounted: then the versions are gone.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from refitd.root.file_systems import Mount, mount_of
from refitd.root.ownership import VOLATILE
from refitd_client.contract.naming import ROOT_NAME, SERVICE_FOLDER
from refitd_client.files.durable import replace_file
from refitd_client.files.plain_file import read_plain

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
        root: the root.
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
