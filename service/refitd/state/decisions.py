"""What operators decided and a service barred, written down a second time: where it is not lost with the journal.

`.refitd/decisions` in the root has the records of the versions that are barred or pinned, of the updates that are
paused, of the runs of which more is known than their versions, and which hub a host obeys. While the journal is sound,
it alone is read. Where it is damaged or gone, what this file says stands (`journal/recovery.py`).

The journal is written first, so `event`, the number of the newest entry of its log, is never ahead of a sound journal:
a journal that ends before it has lost its end. A request of an operator is answered when both are written. Where the
root has no room or does not answer, the journal alone holds what was decided. That is said in the log, and tried again.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from refitd.state.journal.journal import JOURNAL_RETRY_SECONDS, JournalError
from refitd.state.journal.schema import pack, unpack
from refitd.state.observer import Observer
from refitd.state.records import UNLED, HostLead, RunRecord, UpdateRecord
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.contract.states import VersionState
from refitd_client.contract.wire import Event
from refitd_client.files.durable import replace_file
from refitd_client.files.plain_file import read_plain

DECISIONS_NAME = "decisions"
ANSWER_SECONDS = 5.0  # that a request waits for a root that does not answer; the journal has what it asked for

_DECISIONS_BYTES = 1 << 28  # bytes; one version is a thousand


class Decisions(msgspec.Struct, frozen=True, kw_only=True):
    """What is written. `event` is the number of the newest entry of the log when it was."""

    event: int = 0
    versions: tuple[VersionRecord, ...] = ()
    updates: tuple[UpdateRecord, ...] = ()
    runs: tuple[RunRecord, ...] = ()
    lead: HostLead = UNLED


def is_decided(version: VersionRecord | None) -> bool:
    """Whether something was decided about a version that is there."""
    return version is not None and (version.barred or version.pinned) and version.state is not VersionState.DELETED


def read_decisions(root: Path) -> Decisions | None:
    """What was written on a root; None where nothing was yet. A RecordDamagedError says that it is damaged."""
    try:
        return unpack(read_plain(decisions_path(root), _DECISIONS_BYTES), Decisions)
    except FileNotFoundError:
        return None


def write_decisions(root: Path, decisions: Decisions) -> None:
    """Write it, durably and in one piece. Where it cannot be written (OSError), what was written before stays."""
    path = decisions_path(root)
    replace_file(path, pack(decisions), by=path.with_name(f"{DECISIONS_NAME}-{uuid4().hex}"))


def decisions_path(root: Path) -> Path:
    return root / SERVICE_FOLDER / DECISIONS_NAME


class DecisionFile(Observer):
    def __init__(
        self,
        known: Store,
        root: Path,
        in_thread: Callable[[str, Callable[[], None]], Coroutine[Any, Any, None]],
    ) -> None:
        """Observe the store with it before anything is decided. `in_thread` runs a call on the root's file system."""
        self._known, self._root, self._in_thread = known, root, in_thread
        self._paused = {run for run, update in known.updates.items() if update.paused_since is not None}
        self._changes = 1  # the file may be of an earlier state, or damaged: it is written at each start
        self._tried = 0
        self._due = asyncio.Event()
        self._due.set()
        self._ended = asyncio.Condition()
        self._fault: str | None = None

    def version_changed(self, before: VersionRecord | None, after: VersionRecord) -> None:
        if is_decided(before) or is_decided(after):
            self._change()

    def update_changed(self, update: UpdateRecord) -> None:
        if update.paused_since is not None or update.run in self._paused:
            self._paused.discard(update.run)
            if update.paused_since is not None:
                self._paused.add(update.run)
            self._change()

    def decided(self, event: Event) -> None:
        if event.kind == "run":
            self._change()

    def lead_changed(self) -> None:
        self._change()

    def _change(self) -> None:
        self._changes += 1
        self._due.set()

    def _decided(self) -> Decisions:
        return Decisions(
            event=self._known.last_event,
            versions=tuple(version for version in self._known.versions.values() if is_decided(version)),
            updates=tuple(update for update in self._known.updates.values() if update.paused_since is not None),
            runs=tuple(self._known.runs.records()),
            lead=self._known.origin.lead,
        )

    async def written(self) -> None:
        """Wait until what is decided now is in the journal, and in the file too where that can be written."""
        goal = self._changes
        await self._known.durable()
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_SECONDS), self._ended:
                await self._ended.wait_for(lambda: self._tried >= goal)

    async def run(self) -> None:
        """Write the file whenever something was decided, until cancelled."""
        while True:
            await self._due.wait()
            self._due.clear()
            now, decisions = self._changes, self._decided()
            try:
                await self._known.durable()
                await self._in_thread("writing what was decided", partial(write_decisions, self._root, decisions))
            except (JournalError, OSError) as error:
                self._tell(str(error))
            else:
                self._tell(None)
            async with self._ended:
                self._tried = now
                self._ended.notify_all()
            if self._fault is not None:
                await asyncio.sleep(JOURNAL_RETRY_SECONDS)
                self._due.set()

    def _tell(self, fault: str | None) -> None:
        if (fault is None) is not (self._fault is None):
            path = decisions_path(self._root)
            text = f"bars, pins and pauses are in {path} again"
            if fault is not None:
                text = f"bars, pins and pauses are in the journal alone: {path} cannot be written: {fault}; tried again"
            self._known.say("journal", "journal", text, is_fault=fault is not None)
        self._fault = fault
