"""Copies on the made-up disk: written in steps, between which anything may happen, a kill of the service among it."""

import itertools
from collections.abc import Callable

from refitd.catalog.files import Unreadable
from refitd.materialize.files import MisfitError, NoRoomError, SourceChangedError
from refitd.policy.materialize import WriteCopy
from refitd.root.outcome import Discarded, Gone, Refused
from refitd.state.copy import COPIES_PATH, Copy
from refitd.state.version import VersionRecord

from .disk import Make, Pause, SimDisk, SimFolder, signature_of

_HALF = itertools.count(-1, -1)  # contents of what is being written: no version has such


class SimCopies:
    """The materializer's port. `before_write` hears of a step that changes a copy's bytes, `discarded` of its end."""

    def __init__(self, disk: SimDisk, pause: Pause, before_write: Callable[[str, SimFolder], None]) -> None:
        self._disk = disk
        self._pause = pause
        self._before_write = before_write
        self._names = itertools.count(disk.inode() * 1000)

    async def survey(self) -> list[Copy]:
        await self._pause()
        if self._disk.fault is not None:
            raise self._disk.fault
        return [] if self._disk.hidden else [_copy(name, folder) for name, folder in self._disk.copies.items()]

    async def write(self, order: WriteCopy) -> Copy:
        await self._pause()
        content = self._content(order.source)
        name = f"{next(self._names):032x}" if order.into is None else order.into.name
        folder = self._disk.copies.get(name)
        if folder is None:
            if self._disk.no_room:
                raise NoRoomError("there is no room for a copy")
            folder = self._disk.copies[name] = SimFolder(self._disk.inode(), Make.GOOD, next(_HALF))
        self._touch(name, folder)  # its note goes
        await self._pause()
        for delta in order.deltas:
            self._touch(name, folder)  # here it is a mixture
            await self._pause()
            applied = self._version(delta)
            content = applied.content if content in applied.onto else next(_HALF)
        if content < 0:
            raise MisfitError("it is not what its fingerprint says")
        await self._pause()
        self._before_write(name, folder)
        folder.content = content
        target = order.target
        folder.note = (target.order, target.digest, signature_of(folder))
        await self._pause()
        return _copy(name, folder)

    async def signature(self, copy: Copy) -> str | Unreadable | None:
        await self._pause()
        if self._disk.hidden or self._disk.fault is not None:
            return Unreadable("the root cannot be read")
        folder = self._disk.copies.get(copy.name)
        return None if folder is None else signature_of(folder)

    async def discard(self, copy: Copy) -> Discarded | Gone | Refused:
        await self._pause()
        return Gone(copy.path) if self._disk.copies.pop(copy.name, None) is None else Discarded(copy.path)

    def _touch(self, name: str, folder: SimFolder) -> None:
        self._before_write(name, folder)
        folder.note, folder.content, folder.writes = None, next(_HALF), folder.writes + 1

    def _content(self, source: Copy | VersionRecord) -> int:
        if isinstance(source, VersionRecord):
            return self._version(source).content
        folder = self._disk.copies.get(source.name)
        if folder is None or signature_of(folder) != source.signature:
            raise SourceChangedError(f"{source.path} is not what it was")
        return folder.content

    def _version(self, record: VersionRecord) -> SimFolder:
        folder = self._disk.at(record.path)
        if signature_of(folder) != record.signature:
            raise SourceChangedError(f"{record.id} has changed")
        return folder


def copy_path(name: str) -> str:
    """Where a copy lies, relative to the root."""
    return f"{COPIES_PATH}/run/{name}"


def _copy(name: str, folder: SimFolder) -> Copy:
    copy = Copy(run="run", name=name, path=copy_path(name), bytes=100)
    if folder.note is None or folder.note[2] != signature_of(folder):
        return copy
    order, digest, signature = folder.note
    return Copy(run="run", name=name, path=copy.path, bytes=100, order=order, digest=digest, signature=signature)
