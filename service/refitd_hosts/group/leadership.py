"""Which process of a group leads: a lock in the database that ends by itself, and a number that grows at each takeover.

the lock    An advisory lock of a session of its own. The leader asks the database something several times a second, and
            PostgreSQL ends the session (`idle_session_timeout`) when it has heard nothing for `lease` seconds: of a
            process that was killed the lock is free at once, of one that was stopped or cut off after that time.
the lead    Counts from the moment at which the last question that was answered was sent, and is over after two thirds
            of the lease: before the database gives the lock to another. Each side measures by its own monotonic clock,
            so that what time it is plays no part.
the epoch   The number of the takeover, one row of the database. The transaction that takes the lead over raises it, and
            each transaction that writes to the journal reads it under a lock (`check`). What a former leader commits it
            commits before the takeover, whose leader then reads it, or not at all. PostgreSQL ends a transaction that
            is silent (`idle_in_transaction_session_timeout`), but not one that was cut off between two parts of what it
            was sending: that one the next leader ends, a lease after it has first stood in the way.

the wait    A session can also end before its lease: the database restarts, or fails over. So a new leader does nothing
            to an engine before the lead of the one before it is over for sure (`HeldLead.acts_at`), unless that one
            gave its lead back.

A process whose lead is over ends at once (`os._exit`): nothing of it calls an engine or deletes a file."""

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from uuid import uuid4

import msgspec
import psycopg
import sqlalchemy as sa
import structlog
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from refitd.clock import SystemClock
from refitd.state.journal.database import LeadLostError
from refitd_client.contract.decoding import from_json
from refitd_client.contract.wire import GroupLead
from refitd_hosts.group.address import PostgresAddress

EXIT_LEAD_LOST = 75  # EX_TEMPFAIL of sysexits.h: start it again
_LOCK = (0x7265_6669, 0x7464)  # "refitd": one group in a database
_MAKE = """
    CREATE TABLE IF NOT EXISTS leadership (
        id integer PRIMARY KEY CHECK (id = 1),
        epoch bigint NOT NULL,
        service text NOT NULL,
        schema integer NOT NULL,
        leader text NOT NULL
    )
"""
_BEGIN = "INSERT INTO leadership VALUES (1, 0, %s, 0, '') ON CONFLICT DO NOTHING"
_BEFORE = "SELECT leader FROM leadership WHERE id = 1 FOR UPDATE"
_TAKE_OVER = "UPDATE leadership SET epoch = epoch + 1, leader = %s WHERE id = 1 RETURNING epoch, service"
_UNLOCK = "SELECT pg_advisory_unlock(%s, %s)"
_GIVE_BACK = "UPDATE leadership SET leader = %s WHERE id = 1 AND epoch = %s"
_STILL = "SELECT pg_backend_pid(), epoch FROM leadership WHERE id = 1"
_END_FORMER = """
    SELECT pg_terminate_backend(pid) FROM pg_locks
    WHERE database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND relation = 'leadership'::regclass AND mode = 'RowShareLock' AND granted AND pid <> pg_backend_pid()
"""
_CONNECT_SECONDS = 3
# Of libpq: a host that is gone is noticed within seconds, and not when the kernel gives up.
PATIENCE: Mapping[str, int] = {
    "connect_timeout": _CONNECT_SECONDS,
    "keepalives_idle": 1,
    "keepalives_interval": 1,
    "keepalives_count": 3,
    "tcp_user_timeout": 3000,  # milliseconds
}

log = structlog.get_logger("refitd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """The process that leads, or led last: where clients reach it, its machine and process, when it took over (RFC
    3339), the seconds without an answer of the database after which another takes over, the number of the takeover, and
    whether it has given the lead back.
    """

    address: str
    host: str
    pid: int
    since: str
    lease: float
    epoch: int = 0
    released: bool = False


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """How long a lead lasts without an answer of the database, in seconds.

    `lease` is the time after which PostgreSQL ends a silent session, `lead` that after which a leader ends itself,
    `beat` the time between two questions.
    """

    lease: float

    @property
    def lead(self) -> float:  # less than the lease, because the answer's way back counts in it as well
        return self.lease * 2 / 3

    @property
    def beat(self) -> float:  # three questions may go unanswered
        return self.lease / 6

    @property
    def milliseconds(self) -> int:  # of the lease
        return int(self.lease * 1000)


def monotonic() -> float:
    """Seconds of the clock that also counts while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def end_process(reason: str) -> None:
    """End this process without another instruction of its other threads."""
    log.error("this service does not lead any more, and ends", reason=reason, advice="start it again: it stands by")
    os._exit(EXIT_LEAD_LOST)


class Candidate:
    """One process of a group, until it leads. Every call blocks: where a host is gone, for `_CONNECT_SECONDS`."""

    def __init__(self, database: PostgresAddress, address: str, lease: float) -> None:
        """`address` is where clients reach this process, `lease` the seconds after which the lock of a silent leader is
        free.
        """
        self.database = database
        self._address, self._times = address, LeaseTimes(lease)
        self._connection: psycopg.Connection | None = None
        self._blocked = BlockedTime()

    def try_to_lead(self, lost: Callable[[str], None] = end_process) -> "HeldLead | None":
        """Take the lead if it is free, and begin to hold it; None where another has it. `lost` is called once, in a
        thread, when the lead is over before it was given back. A psycopg.Error says that the database does not answer.
        """
        try:
            return self._try(lost)
        except BaseException:
            self.close()
            raise

    def leader(self) -> Leader | None:
        """Who leads, or led last; None where the group never had a leader, or the database does not say."""
        return None if self._connection is None else read_leader(self._connection)

    def interrupt(self) -> None:
        """Break the connection off, so that a call that waits for an answer in another thread ends."""
        connection = self._connection
        if connection is not None:
            with suppress(psycopg.Error, OSError), socket.socket(fileno=os.dup(connection.fileno())) as line:
                line.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _try(self, lost: Callable[[str], None]) -> "HeldLead | None":
        if self._connection is None:
            self._connection = _connected(self.database, self._times)
        asked = monotonic()
        row = self._connection.execute("SELECT pg_try_advisory_lock(%s, %s), pg_backend_pid()", _LOCK).fetchone()
        if row is None or not row[0]:
            return None
        free_at, now = monotonic(), SystemClock().now()
        if free_at - asked > self._times.lead / 2:
            # The lead counts from the question: of one that hung in the database, little or nothing would be left.
            self._connection.execute(_UNLOCK, _LOCK)
            return None
        me = Leader(
            address=self._address, host=socket.gethostname(), pid=os.getpid(), since=now, lease=self._times.lease
        )
        taken = _taken_over(self._connection, me, self._times)
        if taken is None:
            if self._blocked.lasts(monotonic(), self._times.lease):
                self._connection.execute(_END_FORMER)
            self.close()  # with it goes the lock: another may try
            return None
        leader, service, before = taken
        waits = 0.0 if before is None or before.released else LeaseTimes(before.lease).lead
        connection, self._connection = self._connection, None
        return HeldLead(
            connection, int(row[1]), leader, service, until=asked + self._times.lead, acts_at=free_at + waits, lost=lost
        )


def patient(database: PostgresAddress) -> str:
    """What libpq connects by: the URI, with `PATIENCE` where it says nothing else."""
    said = conninfo_to_dict(database.uri)
    return make_conninfo(database.uri, **{name: value for name, value in PATIENCE.items() if name not in said})


def _connected(database: PostgresAddress, times: LeaseTimes) -> psycopg.Connection:
    connection = psycopg.connect(patient(database), autocommit=True, application_name="refitd lead")
    for name in ("idle_session_timeout", "idle_in_transaction_session_timeout"):
        connection.execute("SELECT set_config(%s, %s, false)", [name, str(times.milliseconds)])
    return connection


@dataclass(slots=True)
class BlockedTime:
    """For how long a former leader's transaction has kept a candidate from the lead. Candidates take turns at it."""

    _first: float = 0.0
    _last: float = -math.inf

    def lasts(self, now: float, lease: float) -> bool:
        """Note that it does so now; whether it has for longer than a lease, with no lease of something else between."""
        if now - self._last > lease:
            self._first = now
        self._last = now
        return now - self._first > lease


def _taken_over(
    connection: psycopg.Connection, me: Leader, times: LeaseTimes
) -> tuple[Leader, str, Leader | None] | None:
    """Who leads now, the group's name, and who led before; None where a transaction of a former leader is still open.

    The answer comes long before the session counts as silent.
    """
    try:
        with connection.transaction():
            connection.execute("SELECT set_config('lock_timeout', %s, true)", [str(int(times.beat * 1000))])
            if connection.execute("SELECT to_regclass('leadership')").fetchone() == (None,):
                connection.execute(_MAKE)
                connection.execute(_BEGIN, [uuid4().hex])
            before = connection.execute(_BEFORE).fetchone()
            row = connection.execute(_TAKE_OVER, [_text(me)]).fetchone()
    except psycopg.errors.LockNotAvailable:
        return None
    if row is None or before is None:
        raise psycopg.DataError("the table leadership has lost its row: restore the database, or give refitd a new one")
    return replace(me, epoch=int(row[0])), str(row[1]), _leader(before[0], int(row[0]) - 1)


def _text(leader: Leader) -> str:
    return msgspec.json.encode(leader).decode()


def _leader(text: str, epoch: int) -> Leader | None:
    return replace(from_json(text, Leader), epoch=epoch) if text else None


def read_leader(connection: psycopg.Connection) -> Leader | None:
    """Who leads, or led last; None where the group never had a leader."""
    if connection.execute("SELECT to_regclass('leadership')").fetchone() == (None,):
        return None
    row = connection.execute("SELECT leader, epoch FROM leadership WHERE id = 1").fetchone()
    return None if row is None else _leader(row[0], int(row[1]))


class HeldLead:
    """The lead, held by two threads: one asks the database, one watches that it answers in time.

    `leader` is this process, with the epoch of its lead, and `service` the group's name, which every process of it
    leads engines by. `acts_at` is when (`monotonic`) no former leader can act any more. `session` is the number of the
    connection's process in the database.
    """

    def __init__(
        self,
        connection: psycopg.Connection,
        session: int,
        leader: Leader,
        service: str,
        *,
        until: float,
        acts_at: float,
        lost: Callable[[str], None],
    ) -> None:
        self.leader, self.service, self.times, self.acts_at = leader, service, LeaseTimes(leader.lease), acts_at
        self._connection, self._session = connection, session
        self._lost, self._ending, self._over = lost, threading.Lock(), threading.Event()
        self._until, self._silence = until, ""
        for run in (self._ask, self._watch):
            threading.Thread(target=run, name=f"lead-{run.__name__.strip('_')}", daemon=True).start()

    @property
    def epoch(self) -> int:
        return self.leader.epoch

    @property
    def shown(self) -> GroupLead:
        return GroupLead(address=self.leader.address, since=self.leader.since, epoch=self.epoch)

    def why_not(self) -> str | None:
        """Why this process must not act, in a sentence; None while it is sure to lead."""
        if self._over.is_set() or monotonic() >= self._until:
            return "this service does not lead its group any more"
        return None

    def check(self, connection: sa.Connection) -> None:
        """Hold in a transaction that the lead is still this process's, until the transaction ends, or raise
        LeadLostError.
        """
        epoch = connection.exec_driver_sql("SELECT epoch FROM leadership WHERE id = 1 FOR SHARE").scalar()
        if epoch != self.epoch:
            reason = f"another service of the group leads since, with epoch {epoch} after {self.epoch}"
            self._end(reason)
            raise LeadLostError(reason)
        if (why := self.why_not()) is not None:
            raise LeadLostError(why)

    def release(self) -> None:
        """Give the lead back: another process can take over at once."""
        with self._ending:
            self._over.set()
        with suppress(psycopg.Error):  # then the next leader waits
            self._connection.execute(_GIVE_BACK, [_text(replace(self.leader, released=True)), self.epoch])
            self._connection.execute(_UNLOCK, _LOCK)  # the session's end frees it a moment after the connection's
        self._connection.close()

    def _ask(self) -> None:
        while not self._over.wait(self.times.beat):
            asked = monotonic()
            try:
                row = self._connection.execute(_STILL).fetchone()
            except psycopg.Error as error:
                self._silence = str(error).strip()
                if self._connection.closed:
                    self._end(f"the session that holds the lead has ended: {self._silence}")
                    return
                continue
            if row != (self._session, self.epoch):
                self._end(f"another session or epoch answers than the one that took the lead: {row}")
                return
            self._until = asked + self.times.lead

    def _watch(self) -> None:
        while (left := self._until - monotonic()) > 0:
            if self._over.wait(left):
                return
        self._end(f"the database has not answered for {self.times.lead:g} s {self._silence}".strip())

    def _end(self, reason: str) -> None:
        with self._ending:
            if self._over.is_set():
                return
            self._over.set()
        self._lost(reason)
