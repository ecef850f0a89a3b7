"""Updates of weights that come in calls: begin, parts, finish. What has come between becomes one version.

A trainer's protocol names no version before it has sent the weights, and some name none at all. So all calls go to one
session, whichever engine they are made to. The engines take no part: a trainer that is silent or dies holds up none.

    join      members join the trainer's group, once for the calls to all engines
    begin     what was received of an update that was broken off is dropped
    part      a bucket of tensors, a patch, handles of memory, or a folder; once for the calls to all engines. It is
              answered when the bytes are here
    finish    what has come is one version, served by the engines, or an error

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
from refitd_front.assembly import Assembly, Kind, PartRefusedError, UpdatePart
from refitd_front.members import GroupMembers, MemberLostError, NotKeptError, TrainerGroup
from refitd_front.versions import CheckpointRefusedError, Versions

JOIN_SECONDS = 120.0
PART_SECONDS = 120.0
SILENT_SECONDS = 600.0
_ANEW = "the trainer has to be started again, so that it makes its group anew"
NOT_BEGUN = "no update has begun: /start_weight_update, /begin_weight_update or /pause_generation begins one"
NO_PART = "no weights have come since the update began"
_T = TypeVar("_T")

log = structlog.get_logger("refitd")


def spool_of(root: Path, run: str) -> Path:
    """Where a run's parts lie until they are published: a folder of shared memory, the same after a restart."""
    place = sha256(str(root.absolute() / run).encode()).hexdigest()
    return SHARED_MEMORY / f"{PREFIX}front-{place[:16]}"


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
class _Session:
    assembly: Assembly
    folder: Path
    begun: bool = False
    checkpoint: Path | None = None
    label: str | None = None
    patched: list[str] | None = None
    taking: "dict[int, tuple[str, asyncio.Task[Any]]]" = field(
        default_factory=dict[int, "tuple[str, asyncio.Task[Any]]"]
    )
    finishing: "asyncio.Task[str | None] | None" = None

    @property
    def is_taking(self) -> bool:
        return any(not task.done() for _, task in self.taking.values())

    @property
    def is_empty(self) -> bool:
        return self.assembly.is_empty and self.checkpoint is None


class Sessions:
    """The updates of one run, one at a time. What answers a call returns None, or a sentence that says what is wrong.

    Args:
        versions: publishes what was received, and waits for it.
        spool: where parts lie until they are published, `spool_of`.
        join_seconds: in which the trainer has to make its group.
        part_seconds: in which it has to send a part.
        silent_seconds: after a part, in which the next call has to come. Parts take memory, as much as the model.
    """

    def __init__(
        self,
        versions: Versions,
        spool: Path,
        *,
        join_seconds: float = JOIN_SECONDS,
        part_seconds: float = PART_SECONDS,
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        self._versions = versions
        self._spool = spool
        self._join_seconds = join_seconds
        self._part_seconds = part_seconds
        self._silent_seconds = silent_seconds
        self._groups: dict[str, _JoinedGroup] = {}
        self._begun = 0
        self._earlier: Mapping[str, Kind] | None = None
        self._session = self._next()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._dropping: asyncio.Task[None] | None = None
        self._silence: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Take the spool, and look whether an update was under way when this process's predecessor ended.

        Raises:
            OSError: the spool is another user's, or cannot be removed.
        """
        if not self._spool.is_dir():
            return
        if any(self._spool.iterdir()):
            self._session.assembly.broken("'refitd front' was started anew in the middle of the update")
        shutil.rmtree(self._spool)

    @property
    def is_under_way(self) -> bool:
        return bool(self._tasks)

    async def join(self, engine: str, group: TrainerGroup, offset: int, *, kept: bool = True) -> str | None:
        """Join a group that the trainer is about to make. The calls to all engines join it once.

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
                self._versions.begin_anew()
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
            log.error("the trainer's group was not joined", group=group.name, error=str(error))
            return f"the group {group.name} was not joined: {error}"
        joined.is_usable = True
        log.info("the trainer's group was joined", group=group.name, backend=group.backend, ranks=group.ranks)
        return None

    async def leave(self, name: str) -> None:
        """Leave a group, as the trainer does: its members are ended."""
        joined = self._groups.pop(name, None)
        if joined is not None:
            joined.is_usable = False
            await joined.members.end()

    def begin(self) -> None:
        """Begin an update. Those of all engines are one: nothing changes where nothing has come since."""
        if not self._session.is_empty or self._session.finishing is not None:
            self._begin()
        self._session.begun = True

    def _next(self) -> _Session:
        self._begun += 1
        return _Session(Assembly(self._earlier), self._spool / str(self._begun))

    def _begin(self) -> None:
        left, self._session = self._session, self._next()
        if left.finishing is None and not left.is_empty:
            log.warning("the trainer began anew in the middle of an update: what had arrived is dropped")
        if left.finishing is None or left.finishing.done():
            self._dropping = self._started(self._drop(left, self._dropping))

    async def _drop(self, left: _Session, before: "asyncio.Task[None] | None") -> None:
        if before is not None:
            await before
        if left.is_taking:  # its trainer is gone, or does not send what it has announced
            for name in {group for group, task in left.taking.values() if not task.done()}:
                if (joined := self._groups.get(name)) is not None:
                    joined.is_usable = False
                    await joined.members.end()
            await asyncio.gather(*(task for _, task in left.taking.values()))
        await asyncio.to_thread(shutil.rmtree, left.folder, ignore_errors=True)

    async def bucket(self, engine: str, part: UpdatePart) -> str | None:
        """Take tensors that the trainer is about to send; return when the bytes are here."""
        session = self._session
        try:
            taking = self._taking(session, engine, part)
        except PartRefusedError as error:
            log.error("a part of an update was refused", engine=engine, error=str(error))
            joined = self._groups.get(part.group)
            if joined is not None and joined.is_usable and joined.group.backend == "vllm" and not session.is_taking:
                # vLLM's trainer is in its broadcast by now, and would wait there for ever without hearing of this.
                session.taking[0] = part.group, self._started(self._pass_by(joined, part))
                await asyncio.shield(session.taking[0][1])
            return str(error)
        return await asyncio.shield(taking)

    async def _pass_by(self, joined: _JoinedGroup, part: UpdatePart) -> None:
        """Take part in a broadcast whose tensors are not wanted."""
        try:
            await joined.members.take(part, self._spool, "", (), self._part_seconds)
        except (MemberLostError, NotKeptError):
            joined.is_usable = False
            await joined.members.end()

    def _taking(self, session: _Session, engine: str, part: UpdatePart) -> "asyncio.Task[str | None]":
        if session.finishing is not None and not session.finishing.done():
            raise PartRefusedError("what was received before is still being published")
        if not session.begun or session.finishing is not None:
            raise PartRefusedError(NOT_BEGUN)
        if session.checkpoint is not None:
            raise session.assembly.broken("the update is a folder, and tensors have come as well")
        if part.handles is not None and part.group not in self._groups:  # no trainer makes a group for it
            local = TrainerGroup(name=part.group, address="", port=0, ranks=1, backend="ipc")
            self._groups[part.group] = _JoinedGroup(local, GroupMembers(local), kept=True, is_usable=True)
        joined = self._groups.get(part.group)
        if joined is None or not joined.is_usable:
            raise session.assembly.broken(f"there is no group {part.group} here any more: {_ANEW}")
        number, is_first = session.assembly.announced(engine, part, kept=joined.kept)
        if is_first:
            if session.is_taking:
                raise session.assembly.broken("a bucket was announced before the one before had arrived")
            session.taking[number] = part.group, self._started(self._take(session, joined, part, number))
        return session.taking[number][1]

    async def _take(self, session: _Session, joined: _JoinedGroup, part: UpdatePart, number: int) -> str | None:
        try:
            await asyncio.to_thread(_make_spool, self._spool, session.folder)
            if part.counts and session.patched is None:
                session.patched = await self._versions.copy_base(session.folder)
            file = f"bucket-{number:05}.safetensors" if joined.kept else ""
            await joined.members.take(part, session.folder, file, session.patched or (), self._part_seconds)
        except NotKeptError as error:
            refused = session.assembly.broken(str(error))
        except (MemberLostError, CheckpointRefusedError, OSError) as error:
            joined.is_usable = False
            await joined.members.end()
            if part.handles is not None:
                self._groups.pop(part.group, None)
            anew = _ANEW if part.handles is None else "begin the update again"
            refused = session.assembly.broken(f"bucket {number} has not arrived: {error}; {anew}")
        else:
            session.assembly.has_arrived(number)
            self._listen(session)
            return None
        log.error("a part of an update is not here", group=part.group, bucket=number, error=str(refused))
        await self._mark(session)
        return str(refused)

    def _listen(self, session: _Session) -> None:
        """Give the trainer its time for the next call."""
        if self._silence is not None:
            self._silence.cancel()
        self._silence = asyncio.get_running_loop().call_later(self._silent_seconds, self._give_up, session)

    def _give_up(self, session: _Session) -> None:
        if session is self._session and session.finishing is None and not session.is_taking:
            refused = session.assembly.broken(f"nothing has come for {self._silent_seconds:g} s")
            log.error("an update was given up", error=str(refused))
            self._started(self._mark(session))

    async def _mark(self, session: _Session) -> None:
        """Free what has come of an update that is no version."""
        with suppress(OSError):
            await asyncio.to_thread(_mark, self._spool, session.folder)

    def folder(self, path: Path) -> str | None:
        """Take a checkpoint's folder, which is read at the end of the update."""
        session = self._session
        if not session.begun or session.finishing is not None:
            return NOT_BEGUN
        try:
            self._versions.check_folder(path)
            session.assembly.check()
            if not session.assembly.is_empty or session.checkpoint not in {None, path}:
                raise session.assembly.broken("an update is one folder, and has nothing beside it")
        except (CheckpointRefusedError, PartRefusedError) as error:
            log.error("a part of an update was refused", error=str(error))
            return str(session.assembly.broken(str(error))) if isinstance(error, CheckpointRefusedError) else str(error)
        session.checkpoint = path
        return None

    def name(self, label: str) -> None:
        """Give the update that is under way its label. The last one counts."""
        self._session.label = label

    async def finish(self, *, expected: bool = False) -> str | None:
        """Publish what has come since the update began, once for the calls to all engines, and wait for the engines.

        The answer stays the same until the next update: a trainer makes the call again where it gets an error.

        Args:
            expected: it is an error that there is nothing.
        """
        session = self._session
        if session.finishing is None:
            if session.is_empty:
                return (NO_PART if session.begun else NOT_BEGUN) if expected else None
            session.finishing = self._started(self._publish(session))
        return await asyncio.shield(session.finishing)

    async def _publish(self, session: _Session) -> str | None:
        tensors: Mapping[str, Kind] | None = None
        try:
            if session.checkpoint is not None:
                session.assembly.check()
                fault = await self._versions.serve(session.checkpoint, session.label)
            else:
                tensors = session.assembly.whole()
                fault = await self._versions.serve_received(session.folder, session.label)
        except PartRefusedError as error:
            log.error("an update is no version", error=str(error))
            fault = str(error)
        if fault is None:
            await asyncio.to_thread(shutil.rmtree, session.folder, ignore_errors=True)
            self._earlier = tensors if tensors and self._session is session else self._earlier
        elif session.checkpoint is None:
            await self._mark(session)
        return fault

    def _started(self, work: Coroutine[Any, Any, _T]) -> "asyncio.Task[_T]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def aclose(self) -> None:
        """End the members and what is under way. An update that is not complete leaves its mark in the spool."""
        if self._silence is not None:
            self._silence.cancel()
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
