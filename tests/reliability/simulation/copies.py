"""Copies on the made-up disk: made in steps, between which anything may happen, a kill of the service among it."""

import itertools
from collections.abc import Callable

from refitd.catalog.files import Unreadable
from refitd.policy.materialize import COPIES_PATH, Copy, MakeCopy, copy_name, order_in
from refitd.root.scan import Discarded, Gone, Refused
from refitd.state.version import VersionRecord
from refitd_inside.materialize.writing import CopyError, MisfitError, SourceChangedError

from .disk import Make, Pause, SimDisk, SimFolder, signature_of

_HALF = itertools.count(-1, -1)  # contents of what is being written: no version has such


class SimCopies:
    """In place of `DiskCopies`. `given_up` hears of a copy that is not to be loaded from any more, `before_discard` a
    moment later that it is about to go, and `made` of one that is whole.
    """

    def __init__(
        self,
        disk: SimDisk,
        pause: Pause,
        *,
        given_up: Callable[[Copy], None],
        before_discard: Callable[[Copy], None],
        made: Callable[[], None],
    ) -> None:
        self._disk = disk
        self._pause = pause
        self._given_up = given_up
        self._before_discard = before_discard
        self._made = made
        self._names = itertools.count(disk.inode() * 1000)

    async def survey(self) -> list[Copy]:
        await self._pause()
        if self._disk.fault is not None:
            raise self._disk.fault
        return [] if self._disk.hidden else [_copy(name) for name in self._disk.copies]

    async def write(self, order: MakeCopy) -> Copy:
        await self._pause()
        content = self._content(order.source)
        if self._disk.no_room:
            raise CopyError("there is no room for a copy")
        name, target = copy_name(order.target.order, f"{next(self._names):032x}"), order.target
        folder = self._disk.copies[name] = SimFolder(self._disk.inode(), Make.GOOD, next(_HALF))
        try:
            await self._pause()
            for delta in order.deltas:
                await self._pause()
                applied = self._delta(delta)
                content = applied.content if content in applied.onto else next(_HALF)
            if content < 0:
                raise MisfitError("it is not what its fingerprint says")
        except CopyError:
            del self._disk.copies[name]
            raise
        await self._pause()
        folder.content = content
        self._made()
        await self._pause()
        return _copy(name).proved(target.digest or "", signature_of(folder), 100, {})

    async def signature(self, copy: Copy) -> str | Unreadable | None:
        await self._pause()
        if self._disk.hidden or self._disk.fault is not None:
            return Unreadable("the root cannot be read")
        folder = self._disk.copies.get(copy.name)
        return None if folder is None else signature_of(folder)

    async def discard(self, copy: Copy) -> Discarded | Gone | Refused:
        self._given_up(copy)
        await self._pause()
        if copy.name not in self._disk.copies:
            return Gone(copy.path)
        self._before_discard(copy)
        del self._disk.copies[copy.name]
        return Discarded(copy.path)

    def _content(self, source: Copy | VersionRecord) -> int:
        found = self._disk.copies.get(source.name) if isinstance(source, Copy) else self._disk.at(source.path)
        if found is None or signature_of(found) != source.signature:
            raise SourceChangedError(f"{source.path} is not what it was")
        return found.content

    def _delta(self, record: VersionRecord) -> SimFolder:
        folder = self._disk.at(record.path)
        if signature_of(folder) != record.files.signature:
            raise CopyError(f"{record.id} has changed")
        return folder


def _copy(name: str) -> Copy:
    return Copy(run="run", name=name, path=f"{COPIES_PATH}/run/{name}", bytes=100, order=order_in(name))
