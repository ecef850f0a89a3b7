"""AReaL's group calls, answered in the engines' place: the trainer's broadcasts become versions.

AReaL makes a process group of its rank 0 and all engine ranks, and then at each step broadcasts every tensor, with a
call to each engine for each bucket of them. Here member processes take the engines' places in the group, and what they
receive is published when AReaL lets generation go on. Engines take no part: a trainer that is silent or dies holds up
none of them.

    init      members join the group, once for the calls of all engines
    begin     at a pause: what was received of an update that was broken off is dropped
    bucket    the members take it, once for the calls of all engines; answered when the bytes are there
    finish    before generation goes on: what has arrived is one version, served by the engines, or an error

Each call has a deadline, after which the members are ended and the trainer has to make its group anew, as it does when
it is started. What was received lies in shared memory until it is published; its folder also says, after a crash of
this process, that an update was lost in its middle.
"""

import asyncio
import os
import shutil
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import structlog

from refitd_client.transport.memory import PREFIX, SHARED_MEMORY
from refitd_front.areal.assembly import BucketKey, BucketRefusedError, Kind, UpdateAssembly
from refitd_front.areal.members import GroupMembers, MemberLostError, TrainerGroup
from refitd_front.areal.updates import Updates

JOIN_SECONDS = 120.0
BUCKET_SECONDS = 120.0
_ANEW = "the trainer has to be started again, so that it makes its group anew"
_T = TypeVar("_T")

log = structlog.get_logger("refitd")


def spool_of(root: Path, run: str) -> Path:
    """Where a run's buckets lie until they are published: a folder of shared memory, the same after a restart."""
    place = sha256(str(root.absolute() / run).encode()).hexdigest()
    return SHARED_MEMORY / f"{PREFIX}areal-{place[:16]}"


@dataclass(slots=True, eq=False)
class _JoinedGroup:
    """A group with its members. `kept`: what it brings is the version's; else all comes by another group, too."""

    group: TrainerGroup
    members: GroupMembers
    kept: bool
    offsets: dict[str, int] = field(default_factory=dict[str, int])
    joining: "asyncio.Task[str | None] | None" = None
    is_usable: bool = False


@dataclass(slots=True, eq=False)
class _Update:
    assembly: UpdateAssembly
    folder: Path
    taking: "dict[BucketKey, asyncio.Task[str | None]]" = field(
        default_factory=dict[BucketKey, "asyncio.Task[str | None]"]
    )
    finishing: "asyncio.Task[str | None] | None" = None

    @property
    def is_taking(self) -> bool:
        return any(not task.done() for task in self.taking.values())


class GroupCalls:
    """The group calls of all facades of a process.

    Methods that answer a call return None, or a sentence that says what is wrong.

    Args:
        updates: publishes what was received, and waits for it.
        spool: where buckets lie until they are published, `spool_of`.
        join_seconds: in which the trainer has to make its group.
        bucket_seconds: in which it has to send a bucket.
    """

    def __init__(
        self,
        updates: Updates,
        spool: Path,
        *,
        join_seconds: float = JOIN_SECONDS,
        bucket_seconds: float = BUCKET_SECONDS,
    ) -> None:
        self._updates = updates
        self._spool = spool
        self._join_seconds = join_seconds
        self._bucket_seconds = bucket_seconds
        self._groups: dict[str, _JoinedGroup] = {}
        self._earlier: Mapping[str, Kind] | None = None
        self._begun = 0
        self._update = self._next()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._dropping: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Take the spool, and look whether an update was under way when this process's predecessor ended.

        Raises:
            OSError: the spool is another user's, or cannot be removed.
        """
        if not self._spool.is_dir():
            return
        if any(self._spool.iterdir()):
            self._update.assembly.broken("'refitd areal' was started anew in the middle of the update")
        shutil.rmtree(self._spool)

    @property
    def is_under_way(self) -> bool:
        return bool(self._tasks)

    async def init(self, engine: str, group: TrainerGroup, offset: int, *, kept: bool) -> str | None:
        """Join a group that the trainer is about to make. The calls of all engines join it once.

        Args:
            offset: the first rank of this engine.
            kept: whether the tensors are the version's; else the same come by another group.
        """
        if not 0 < offset <= group.ranks:
            return f"rank_offset {offset} is no rank of an engine in a group of {group.ranks + 1} ranks"
        joined = self._groups.get(group.name)
        if joined is None or joined.group != group or engine in joined.offsets:
            before, joined = joined, _JoinedGroup(group, GroupMembers(group), kept)
            self._groups[group.name] = joined
            if kept:
                self._earlier = None  # a trainer that begins: what its model has is for the service to judge
                self._begin()
            joined.joining = self._started(self._join(joined, before))
        if offset in joined.offsets.values():
            return f"rank_offset {offset} is that of another engine, too"
        joined.offsets[engine] = offset
        return None if joined.joining is None else await asyncio.shield(joined.joining)

    async def _join(self, joined: _JoinedGroup, before: _JoinedGroup | None) -> str | None:
        if before is not None:
            before.is_usable = False
            await before.members.end()
        group = joined.group
        try:
            await joined.members.join(self._join_seconds)
        except MemberLostError as error:
            log.error("AReaL's group was not joined", group=group.name, error=str(error))
            return f"the group {group.name} was not joined: {error}"
        joined.is_usable = True
        log.info("AReaL's group was joined", group=group.name, backend=group.backend, ranks=group.ranks)
        return None

    def begin(self) -> None:
        """Begin an update, at a pause. That of all engines is one: nothing changes where nothing has come since."""
        if not self._update.assembly.is_empty:
            self._begin()

    def _next(self) -> _Update:
        self._begun += 1
        return _Update(UpdateAssembly(self._earlier), self._spool / str(self._begun))

    def _begin(self) -> None:
        left, self._update = self._update, self._next()
        if left.finishing is None and not left.assembly.is_empty:
            log.warning("AReaL began anew in the middle of an update: what had arrived is dropped")
        if left.finishing is None or left.finishing.done():
            self._dropping = self._started(self._drop(left, self._dropping))

    async def _drop(self, left: _Update, before: "asyncio.Task[None] | None") -> None:
        if before is not None:
            await before
        if left.is_taking:  # its trainer is gone, or does not send what it has announced
            for name in {key.group for key, task in left.taking.items() if not task.done()}:
                self._groups[name].is_usable = False
                await self._groups[name].members.end()
            await asyncio.gather(*left.taking.values())
        await asyncio.to_thread(shutil.rmtree, left.folder, ignore_errors=True)

    async def bucket(self, engine: str, key: BucketKey) -> str | None:
        """Take a bucket that the trainer is about to broadcast; return when the bytes are there."""
        update = self._update
        if update.finishing is not None and update.finishing.done():
            self._begin()
            update = self._update
        try:
            taking = self._taking(update, engine, key)
        except BucketRefusedError as error:
            log.error("a bucket of AReaL's was refused", engine=engine, error=str(error))
            return str(error)
        return await asyncio.shield(taking)

    def _taking(self, update: _Update, engine: str, key: BucketKey) -> "asyncio.Task[str | None]":
        if update.finishing is not None:
            raise BucketRefusedError("what was received before is still being published")
        joined = self._groups.get(key.group)
        if joined is None or not joined.is_usable:
            raise update.assembly.broken(f"there is no group {key.group} here any more: {_ANEW}")
        number, is_first = update.assembly.announced(engine, key, kept=joined.kept)
        if is_first:
            if update.is_taking:
                raise update.assembly.broken("a bucket was announced before the one before had arrived")
            update.taking[key] = self._started(self._take(update, joined, key, number))
        return update.taking[key]

    async def _take(self, update: _Update, joined: _JoinedGroup, key: BucketKey, number: int) -> str | None:
        try:
            await asyncio.to_thread(_make_spool, self._spool, update.folder)
            file = str(update.folder / f"bucket-{number:05}.safetensors") if joined.kept else ""
            await joined.members.take(key.tensors, file, self._bucket_seconds)
        except (MemberLostError, OSError) as error:
            joined.is_usable = False
            await joined.members.end()
            refused = update.assembly.broken(f"bucket {number} has not arrived: {error}; {_ANEW}")
            log.error("a bucket of AReaL's has not arrived", group=key.group, bucket=number, error=str(error))
            return str(refused)
        update.assembly.has_arrived(key)
        return None

    async def finish(self) -> str | None:
        """Publish what has arrived since the last pause, once for the calls of all engines, and wait for the engines.

        The answer stays the same until the next pause: AReaL makes the call again where it gets an error.
        """
        update = self._update
        if update.finishing is None:
            if update.assembly.is_empty:
                return None
            update.finishing = self._started(self._publish(update))
        return await asyncio.shield(update.finishing)

    async def _publish(self, update: _Update) -> str | None:
        try:
            tensors = update.assembly.whole()
            fault = await self._updates.serve_received(update.folder)
        except BucketRefusedError as error:
            log.error("AReaL's update is no version", error=str(error))
            tensors, fault = None, str(error)
        if fault is None:
            await asyncio.to_thread(shutil.rmtree, update.folder, ignore_errors=True)
            self._earlier = tensors if self._update is update else self._earlier
        else:
            with suppress(OSError):
                await asyncio.to_thread(_mark, self._spool, update.folder)
        return fault

    def _started(self, work: Coroutine[Any, Any, _T]) -> "asyncio.Task[_T]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def aclose(self) -> None:
        """End the members and what is under way. An update that is not complete leaves its mark in the spool."""
        for joined in self._groups.values():
            await joined.members.end()
        if self._dropping is not None:
            await self._dropping
        for task in set(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for file in self._spool.glob("*/*"):
            file.unlink(missing_ok=True)
        with suppress(OSError):
            self._spool.rmdir()


def _mark(spool: Path, folder: Path) -> None:
    """Leave an update's folder without its tensors: that it has failed is known after a restart, too.

    Raises:
        OSError: it cannot be made, or its files cannot be removed.
    """
    _make_spool(spool, folder)
    for file in folder.iterdir():
        file.unlink()


def _make_spool(spool: Path, folder: Path) -> None:
    """Make the folder of an update in the spool, which has to be this user's.

    Raises:
        OSError: it cannot be made.
    """
    spool.mkdir(mode=0o700, exist_ok=True)
    if spool.is_symlink() or spool.stat().st_uid != os.geteuid():
        raise PermissionError(f"{spool} belongs to another user: remove it")
    folder.mkdir(exist_ok=True)
