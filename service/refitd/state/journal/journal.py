"""The journal: the facts that must outlive the process, in SQLite or PostgreSQL, through SQLAlchemy Core.

Writes queue in order and are committed in batches by one thread, so that what is durable is always a prefix of what
happened. A caller that needs a fact on disk awaits `durable()`; one wait covers all that came before.
A batch that fails (disk full) stays queued and is tried again: `durable()` raises meanwhile, nothing is reordered.
The disk and the engines are the truth: the journal can be rebuilt from a scan and a probe.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DatabaseError, OperationalError

from refitd.state.journal.database import WHEN_THERE_IS_ROOM, JournalDatabase, LeadLostError, SqliteFile
from refitd.state.journal.rows import JournalWrite, in_few_statements
from refitd.state.records import NEW, Origin

JOURNAL_RETRY_SECONDS = 1.0
GATHERING_TURNS = 4  # of the loop: what one event sets off elsewhere goes to disk with it, by one sync instead of two
AnswerT = TypeVar("AnswerT")


class JournalError(Exception):
    """The journal cannot be written or read now (disk full, folder gone, database unreachable). It is tried again by
    itself; `remedy` says when that succeeds.
    """

    def __init__(self, text: str, remedy: str = WHEN_THERE_IS_ROOM) -> None:
        super().__init__(text)
        self.remedy = remedy


def _told(failure: Exception | None) -> str:
    """What the file system or the database says, without what the library adds for programmers."""
    return str(getattr(failure, "orig", None) or failure).strip()


class Journal:
    """One journal. Writes are queued on the event loop; reads are plain calls for any thread. `newest_event` is the
    number of the newest entry of the log that is on disk, once the store has read it.
    """

    def __init__(self, place: Path | JournalDatabase, origin: Origin = NEW) -> None:
        """Open or create the journal, in a database or in a folder by SQLite; `origin` is for one that is created. An
        OSError or DatabaseError says that it cannot be opened, or is no journal. `recovery.open_journal` looks before.
        """
        self.database = SqliteFile(place) if isinstance(place, Path) else place
        self._db = self.database.engine
        try:
            self.database.create(origin)
        except BaseException:
            self._db.dispose()
            raise
        # Its own: where the root's file system hangs, it hangs every thread that others share.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._queue: deque[JournalWrite] = deque()
        self._appended = 0
        self._told = 0
        self.newest_event = 0
        self._durable = 0
        self._failure: Exception | None = None
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._work = asyncio.Event()

    @property
    def fault(self) -> str | None:
        """Why it could not be written the last time, None where it could."""
        return None if self._failure is None else _told(self._failure)

    def append(self, *writes: JournalWrite) -> None:
        self._queue.extend(writes)
        for write in writes:
            self._appended += 1
            if write.is_told:
                self._told = self._appended
        self._work.set()

    async def durable(self, *, told: bool = False) -> None:
        """Wait until what was appended before this call is on disk; with `told` for what others act on
        (`JournalWrite.is_told`) and what came before it, and for no more. A JournalError says that it could not be
        written just now.
        """
        goal = self._told if told else self._appended
        while self._durable < goal and self._failure is None:
            written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((goal, written))
            await written
        if self._durable < goal:
            self.check()

    def check(self) -> None:
        """Raise a JournalError if the last commit failed, and has not been repeated yet."""
        if self._failure is not None:
            what = f"the journal {self.database.name} cannot be written: {_told(self._failure)}"
            raise JournalError(what, self.database.remedy) from self._failure

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
                    await asyncio.sleep(JOURNAL_RETRY_SECONDS)
                    self._work.set()
        finally:
            await asyncio.shield(self._commit_queued())

    async def _commit_queued(self) -> None:
        while self._queue:
            batch = list(self._queue)
            failure = await asyncio.get_running_loop().run_in_executor(self._thread, self._commit, batch)
            self._failure = failure
            if failure is None:
                for write in batch:
                    self._queue.popleft()
                    self.newest_event = write.event or self.newest_event
                self._durable += len(batch)
            self._wake()
            if failure is not None:
                return

    def _wake(self) -> None:
        """Wake all who wait for what is durable now, at once; after a failure all who wait."""
        waiting, self._waiting = self._waiting, []
        for goal, written in waiting:
            if self._failure is None and goal > self._durable:
                self._waiting.append((goal, written))
            elif not written.done():
                written.set_result(None)

    def _commit(self, batch: list[JournalWrite]) -> Exception | None:
        try:
            with self._db.begin() as connection:
                self.database.check_lead(connection)
                for statement, values in in_few_statements(batch, connection.dialect.name):
                    connection.execute(statement, values)
        except (DatabaseError, OSError, LeadLostError) as error:
            return error
        return None

    def write_now(self, writes: Sequence[JournalWrite]) -> None:
        """Commit these, before `run`. Blocks."""
        if (failure := self._commit(list(writes))) is not None:
            raise failure

    def read(self, query: Callable[[sa.Connection], AnswerT]) -> AnswerT:
        """Run a query on a connection of its own. A JournalError says that the database does not answer."""
        try:
            with self._db.connect() as connection:
                return query(connection)
        except OperationalError as error:
            what = f"the journal {self.database.name} cannot be read: {_told(error)}"
            raise JournalError(what, self.database.remedy) from error

    def close(self) -> None:
        """Give the connections back. Call it after `run` has ended."""
        self._thread.shutdown()
        self._db.dispose()
