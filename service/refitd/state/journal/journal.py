"""The journal: the facts that must outlive the process, in SQLite (WAL, synchronous=FULL) through SQLAlchemy Core.

Writes queue in order and are committed in batches by one thread, so that what is durable is always a prefix of what
happened. A caller that needs a fact on disk awaits `durable()`; one wait covers all that came before.
A batch that fails (disk full) stays queued and is tried again: `durable()` raises meanwhile, nothing is reordered.
The disk and the engines are the truth: the journal can be rebuilt from a scan and a probe.
"""

import asyncio
import sqlite3
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import DatabaseError

from refitd.state.journal.copies import make_private
from refitd.state.journal.migrate import in_one_transaction
from refitd.state.journal.reads import read_origin
from refitd.state.journal.schema import SCHEMA_VERSION, metadata
from refitd.state.journal.writes import JournalWrite, put_origin
from refitd.state.records import NEW, Origin
from refitd_client.files.durable import make_folders, sync_folder

JOURNAL_NAME = "journal.db"
RETRY_SECONDS = 1.0
GATHERING_TURNS = 4  # of the loop: what one event sets off elsewhere goes to disk with it, by one sync instead of two
AnswerT = TypeVar("AnswerT")


class JournalError(Exception):
    """The journal cannot be written now (disk full, folder gone); the cause says why. It is tried again by itself."""


def _told(failure: Exception | None) -> str:
    """What the file system or SQLite says, without what the library adds for programmers."""
    return str(getattr(failure, "orig", None) or failure)


class Journal:
    """One journal file. Writes are queued on the event loop; reads are plain calls for any thread."""

    def __init__(self, folder: Path, origin: Origin = NEW) -> None:
        """Open or create the journal; `origin` is for one that is created. `recovery.open_journal` looks at it before.

        Raises:
            OSError, sqlalchemy.exc.DatabaseError: it cannot be opened, or is no journal.
        """
        if not folder.is_dir():  # SQLite syncs the names in the folder, but not the folder's own
            make_folders(folder.parent)
            folder.mkdir(exist_ok=True, mode=0o700)
            sync_folder(folder.parent)
        self.path = folder / JOURNAL_NAME
        make_private(self.path)
        self._db = sa.create_engine(f"sqlite:///{self.path}", connect_args={"check_same_thread": False})
        event.listen(self._db, "connect", _set_pragmas)
        try:
            self._create(origin)
        except BaseException:
            self._db.dispose()
            raise
        # Its own: where the root's file system hangs, it hangs every thread that others share.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._queue: deque[JournalWrite] = deque()
        self._appended = 0
        self._durable = 0
        self._failure: Exception | None = None
        self._progress = asyncio.Condition()
        self._work = asyncio.Event()

    def _create(self, origin: Origin) -> None:
        """Make what is missing, all or nothing. Without an origin a journal counts as never used."""
        with in_one_transaction(self._db) as connection:
            metadata.create_all(connection)
            if read_origin(connection) is None:
                connection.exec_driver_sql(f"PRAGMA user_version={SCHEMA_VERSION}")
                write = put_origin(origin)
                connection.execute(write.statement, write.values)

    @property
    def fault(self) -> str | None:
        """Why it could not be written the last time, None where it could."""
        return None if self._failure is None else _told(self._failure)

    def append(self, *writes: JournalWrite) -> None:
        """Queue writes, in order."""
        self._queue.extend(writes)
        self._appended += len(writes)
        self._work.set()

    async def durable(self) -> None:
        """Wait until all that was appended before this call is on disk.

        Raises:
            JournalError: it could not be written just now.
        """
        goal = self._appended
        async with self._progress:
            await self._progress.wait_for(lambda: self._durable >= goal or self._failure is not None)
            if self._durable < goal:
                raise JournalError(
                    f"the journal {self.path} cannot be written: {_told(self._failure)}"
                ) from self._failure

    async def run(self) -> None:
        """Commit what is queued, until cancelled; what is queued then is committed first."""
        try:
            while True:
                await self._work.wait()
                for _ in range(GATHERING_TURNS):
                    await asyncio.sleep(0)
                self._work.clear()
                await self._commit_queued()
                if self._failure is not None:
                    await asyncio.sleep(RETRY_SECONDS)
                    self._work.set()
        finally:
            await asyncio.shield(self._commit_queued())

    async def _commit_queued(self) -> None:
        while self._queue:
            batch = list(self._queue)
            failure = await asyncio.get_running_loop().run_in_executor(self._thread, self._commit, batch)
            async with self._progress:
                self._failure = failure
                if failure is None:
                    for _ in batch:
                        self._queue.popleft()
                    self._durable += len(batch)
                self._progress.notify_all()
            if failure is not None:
                return

    def _commit(self, batch: list[JournalWrite]) -> Exception | None:
        try:
            with self._db.begin() as connection:
                for write in batch:
                    connection.execute(write.statement, write.values)
        except (DatabaseError, OSError) as error:
            return error
        return None

    def read(self, query: Callable[[sa.Connection], AnswerT]) -> AnswerT:
        """Run a query on a connection of its own."""
        with self._db.connect() as connection:
            return query(connection)

    def close(self) -> None:
        """Give the file back. Call it after `run` has ended."""
        self._thread.shutdown()
        self._db.dispose()


def _set_pragmas(connection: sqlite3.Connection, _: Any) -> None:
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=5000"):
        connection.execute(f"PRAGMA {pragma}")
