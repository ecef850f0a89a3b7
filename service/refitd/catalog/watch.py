"""Hints that something in the root has changed. A hint carries no message: the scan finds out what it was.

watchdog loses events in bursts and its handler hears of no overflow; NFS and Lustre give none at all. So an event means
"look again" and nothing else, and the catalog scans from time to time whether one came or not.
"""

import asyncio
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import structlog
from watchdog.events import (
    DirCreatedEvent,
    DirMovedEvent,
    FileClosedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver
from watchdog.observers.inotify_move_event_grouper import InotifyMoveEventGrouper
from watchdog.observers.polling import PollingObserver

from refitd.root.file_systems import root_file_system, wants_polling
from refitd_client.contract.naming import INCOMING_PREFIX, SERVICE_FOLDER

POLL_SECONDS = 0.5
PAIRING_SECONDS = 0.01

# watchdog holds all events back behind half a rename, such as one into the trash, for half a second, in case the other
# half comes. Here a rename is a hint like any other, whole or half.
InotifyMoveEventGrouper.delay = PAIRING_SECONDS

log = structlog.get_logger("refitd")


# A file counts when it is closed. Deletions are left to the scan and to the check before each load: the collector
# deletes hundreds of files, and each event costs the interpreter's lock a turn while an update waits for it.
_EVENTS: list[type[FileSystemEvent]] = [DirCreatedEvent, DirMovedEvent, FileMovedEvent, FileClosedEvent]


class _Hints(FileSystemEventHandler):
    """Calls `nudge` on the loop for events that may be a version coming; reads and writes inside files are noise."""

    def __init__(self, root: Path, loop: asyncio.AbstractEventLoop, nudge: Callable[[], None]) -> None:
        self._own = str(root / SERVICE_FOLDER)
        self._loop = loop
        self._nudge = nudge

    def on_any_event(self, event: FileSystemEvent) -> None:
        if str(event.src_path).startswith(self._own):
            return
        if event.event_type != "moved" and f"/{INCOMING_PREFIX}" in str(event.src_path):
            return  # a version that is being written: it arrives by a rename
        with suppress(RuntimeError):  # the loop closed while the observer's thread was still delivering
            self._loop.call_soon_threadsafe(self._nudge)


class Watcher:
    """An observer thread for the root."""

    def __init__(self, root: Path, loop: asyncio.AbstractEventLoop, nudge: Callable[[], None]) -> None:
        self._root = root
        self._handler = _Hints(root, loop, nudge)
        self._observer: BaseObserver | None = None

    async def run(self) -> None:
        """Watch until cancelled."""
        await asyncio.to_thread(self._start)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.shield(asyncio.to_thread(self._stop))

    def _start(self) -> None:
        """Start watching; poll where events are refused (too many watches)."""
        # A directory that is renamed is watched already, and watchdog says so at each version: several lines each time.
        warnings.filterwarnings("ignore", message="Callback with id", category=RuntimeWarning)
        try:
            self._observer = self._observe(polling=wants_polling(root_file_system(self._root)))
        except OSError as error:
            log.warning("file events are refused: polling instead", error=str(error))
            self._observer = self._observe(polling=True)

    def _observe(self, *, polling: bool) -> BaseObserver:
        observer: BaseObserver = PollingObserver(timeout=POLL_SECONDS) if polling else Observer()
        observer.schedule(self._handler, str(self._root), recursive=True, event_filter=_EVENTS)
        observer.start()
        return observer

    def _stop(self) -> None:
        if self._observer is not None:
            self._observer.stop()
            self._observer.join(timeout=5)
