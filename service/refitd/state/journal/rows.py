"""What can be asked of the journal, and what can be written to it.

Each function that reads takes a connection, so that a caller can ask several in one go. Each raises RecordDamagedError
where a record is not what was written; those of the log show it in its place.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy import UpdateBase
from sqlalchemy.dialects import postgresql, sqlite

from refitd.state.journal.schema import (
    RecordDamagedError,
    attempts,
    engines,
    events,
    fingerprints,
    origin,
    pack,
    runs,
    unpack,
    updates,
    versions,
)
from refitd.state.observer import EVERYTHING, LogFilter
from refitd.state.records import AttemptRecord, EngineRecord, FingerprintRecord, Origin, RunRecord, UpdateRecord
from refitd.state.version import VersionRecord
from refitd_client.contract.states import LogSeverity, VersionState
from refitd_client.contract.wire import Event

Insert: TypeAlias = sqlite.Insert | postgresql.Insert
_INSERT: dict[str, Callable[[sa.Table], Insert]] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}

# Each kind of record, and the table that has a row for each.
TABLES: Mapping[type[Any], sa.Table] = {
    VersionRecord: versions,
    EngineRecord: engines,
    AttemptRecord: attempts,
    UpdateRecord: updates,
    RunRecord: runs,
    FingerprintRecord: fingerprints,
    Event: events,
}
_FACTS: Mapping[str, Callable[[Any], Any]] = {  # that repeat a fact of the record, and where it has it
    **{name: attrgetter(name) for name in ("id", "run", "created_at", "engine", "version", "outcome", "configuration")},
    **{name: attrgetter(name) for name in ("number", "seq", "subject")},
    **{name: attrgetter(f"order.{name}") for name in ("generation", "step")},
    "state": attrgetter("state.value"),
}
_TOLD = frozenset({versions, updates, runs})  # followers, trainers and people act on these
_DROPPED_BY = {engines: engines.c.id, fingerprints: fingerprints.c.version}
RecordT = TypeVar("RecordT")
ListPlace = tuple[str, int, int, str]  # of a version in lists: its `created_at`, generation, step, run


@dataclass(frozen=True, slots=True)
class JournalWrite:
    """A row that is put into a table, with its values by column; or with `of` alone, rows that are dropped from it."""

    table: sa.Table
    values: dict[str, Any]

    @property
    def is_told(self) -> bool:
        """Whether others act on it. Engines are not waited for by those who only read: in an update of a thousand,
        thousands of their writes wait for the disk.
        """
        return self.table in _TOLD

    @property
    def event(self) -> int | None:
        """The number of the entry of the log that it writes."""
        return self.values["seq"] if self.table is events else None

    def statement(self, dialect: str) -> UpdateBase:
        return _drop_from(self.table) if "of" in self.values else _put_into(self.table, dialect)

    def carry_out(self, connection: sa.Connection) -> None:
        connection.execute(self.statement(connection.dialect.name), self.values)


# Statements are made once for each dialect: making one takes longer than running it.
@cache
def _put_into(table: sa.Table, dialect: str) -> UpdateBase:
    return _or_update(table, _INSERT[dialect](table))


@cache
def _drop_from(table: sa.Table) -> UpdateBase:
    return sa.delete(table).where(_DROPPED_BY[table] == sa.bindparam("of"))


def _or_update(table: sa.Table, insert: Insert) -> UpdateBase:
    others = {column.name: insert.excluded[column.name] for column in table.columns if not column.primary_key}
    return insert.on_conflict_do_update(index_elements=list(table.primary_key), set_=others)


def in_few_statements(batch: Iterable[JournalWrite], dialect: str) -> Iterator[tuple[UpdateBase, list[dict[str, Any]]]]:
    """The same writes as statements with many values each, in what order leaves the database the same.

    What is written to one table stays in order; tables do not look at each other. A statement is a tenth of a
    millisecond of a processor, whose values take a tenth of that: an update of a thousand engines is ten thousand.
    """
    waiting: dict[sa.Table, tuple[UpdateBase, list[dict[str, Any]]]] = {}
    ready: list[tuple[UpdateBase, list[dict[str, Any]]]] = []
    for write in batch:
        statement, table = write.statement(dialect), write.table
        if table in waiting and waiting[table][0] is not statement:
            ready.append(waiting.pop(table))
        waiting.setdefault(table, (statement, []))[1].append(write.values)
    for statement, rows in (*ready, *waiting.values()):
        yield _in_one_text(statement, rows) if dialect == "sqlite" else (statement, rows)


def _in_one_text(statement: UpdateBase, rows: list[dict[str, Any]]) -> tuple[UpdateBase, list[dict[str, Any]]]:
    """The same rows as one text, where many are put.

    SQLite's driver takes the interpreter's lock again after each row, and the event loop has that most of the time. A
    statement that finds its rows in a text runs to its end without it.
    """
    table = statement.table
    if len(rows) == 1 or "of" in rows[0]:
        return statement, rows
    cells = ([row[name] for name in table.columns.keys()] for row in rows)  # noqa: SIM118 - no mapping
    text = msgspec.json.encode([[each.decode() if isinstance(each, bytes) else each for each in row] for row in cells])
    if b"\\u0000" in text:  # SQLite before 3.45 ends a string there
        return statement, rows
    return _put_text_into(table), [{"rows": text.decode()}]


@cache
def _put_text_into(table: sa.Table) -> UpdateBase:
    """Put the rows of a JSON text: arrays with a value for each column."""
    row = sa.func.json_each(sa.bindparam("rows", type_=sa.Text)).table_valued("value").c.value
    cells = [sa.func.json_extract(row, f"$[{number}]") for number in range(len(table.columns))]
    typed = [
        sa.cast(cell, column.type) if isinstance(column.type, sa.LargeBinary) else cell
        for cell, column in zip(cells, table.columns, strict=True)
    ]
    # Without a condition SQLite takes the "ON" of "ON CONFLICT" for that of a join.
    rows = sa.select(*typed).where(sa.true())
    return _or_update(table, sqlite.insert(table).from_select(table.columns.keys(), rows))


def put(record: object) -> JournalWrite:
    """Write a record as it is now."""
    table = TABLES[type(record)]
    values = {name: found(record) for name, found in _FACTS.items() if name in table.columns}
    return JournalWrite(table, {**values, "record": pack(record)})


def put_origin(record: Origin) -> JournalWrite:
    """Write how the journal began, and whether it is rebuilt."""
    return JournalWrite(origin, {"id": 1, "record": pack(record)})


def drop_engine(engine_id: str) -> JournalWrite:
    return JournalWrite(engines, {"of": engine_id})


def drop_fingerprints(version: str) -> JournalWrite:
    """Forget what clean loads of a version gave."""
    return JournalWrite(fingerprints, {"of": version})


def check_rows(connection: sa.Connection, *, with_log: bool) -> None:
    """Decode every record, and hold the columns of its row against it. A RecordDamagedError names the first that is not
    what was written.
    """
    for kind, table in TABLES.items():
        if table is events and not with_log:
            continue
        for row in connection.execute(sa.select(table)).mappings():
            record = unpack(row["record"], kind)
            for name, found in _FACTS.items():
                if name in table.columns and row[name] != (value := found(record)):
                    said = f"a record of {kind.__name__} says {value!r}"
                    raise RecordDamagedError(f"{said} where its row says {row[name]!r}")


def read_records(connection: sa.Connection, kind: type[RecordT]) -> list[RecordT]:
    """All records of a kind."""
    return [unpack(row, kind) for row in connection.scalars(sa.select(TABLES[kind].c.record))]


LOOKED_AT = 5000  # entries of the log that one page with a filter reads: a page takes tens of milliseconds at most
_ROWS = 500


def read_versions(
    connection: sa.Connection,
    *,
    run: str | None = None,
    state: VersionState | None = None,
    before: ListPlace | None = None,
    limit: int | None = None,
) -> list[VersionRecord]:
    """Versions, newest first: of a run by generation and step, of all runs by when they were first seen. `before` is
    where the last page ended.
    """
    parts = (versions.c.created_at, versions.c.generation, versions.c.step, versions.c.run)
    at = slice(None) if run is None else slice(1, 3)
    query = sa.select(versions.c.record).order_by(*(part.desc() for part in parts[at]))
    if run is not None:
        query = query.where(versions.c.run == run)
    if state is not None:
        query = query.where(versions.c.state == state.value)
    if before is not None:
        query = query.where(sa.tuple_(*parts[at]) < sa.tuple_(*map(sa.literal, before[at])))
    return [unpack(row, VersionRecord) for row in connection.scalars(query.limit(limit))]


def read_version(connection: sa.Connection, version_id: str) -> VersionRecord | None:
    row = connection.scalar(sa.select(versions.c.record).where(versions.c.id == version_id))
    return None if row is None else unpack(row, VersionRecord)


def read_events(connection: sa.Connection, *, after: int, limit: int, subject: str | None = None) -> list[Event]:
    """The log behind `after`, oldest first."""
    query = sa.select(events).where(events.c.seq > after).order_by(events.c.seq).limit(limit)
    if subject is not None:
        query = query.where(events.c.subject == subject)
    return [_entry(row) for row in connection.execute(query)]


def _entry(row: sa.Row[Any]) -> Event:
    """An entry of the log. The start does not read them, and one that is damaged must not hide all others."""
    try:
        return unpack(row.record, Event)
    except RecordDamagedError as error:
        return Event(
            seq=row.seq,
            at="1970-01-01T00:00:00Z",
            kind="journal",
            subject="journal",
            text=f"this entry cannot be read: {error}",
            severity=LogSeverity.WARNING,
        )


def read_log(
    connection: sa.Connection,
    *,
    before: int | None,
    limit: int,
    subject: str | None = None,
    wanted: LogFilter = EVERYTHING,
) -> tuple[list[Event], int | None]:
    """Return entries of the log, newest first, and the `before` of the page that follows; None where there is none.

    A filter that few entries fit ends a page early: it looks at about `LOOKED_AT` entries.
    """
    rows = limit + 1 if wanted == EVERYTHING else _ROWS
    newest_first = sa.select(events).order_by(events.c.seq.desc()).limit(rows)
    if subject is not None:
        newest_first = newest_first.where(events.c.subject == subject)
    found, at = list[Event](), before
    for _ in range(0, LOOKED_AT, rows):
        query = newest_first if at is None else newest_first.where(events.c.seq < at)
        looked_at = [_entry(row) for row in connection.execute(query)]
        for event in looked_at:
            if wanted.fits(event):
                if len(found) == limit:
                    return found, at
                found.append(event)
            at = event.seq
        if len(looked_at) < rows:
            return found, None
    return found, at


def read_last_event(connection: sa.Connection) -> int:
    """The number of the newest event, 0 where there is none."""
    return connection.scalar(sa.select(sa.func.max(events.c.seq))) or 0


def read_open_attempts(connection: sa.Connection) -> list[AttemptRecord]:
    """Attempts without an outcome: each belonged to a process that died in the middle."""
    query = sa.select(attempts.c.record).where(attempts.c.outcome.is_(None))
    return [unpack(row, AttemptRecord) for row in connection.scalars(query)]


def read_attempts(
    connection: sa.Connection, *, limit: int, version: str | None = None, engine: str | None = None
) -> list[AttemptRecord]:
    """The newest attempts to bring engines to a version, or those of an engine, the oldest of them first."""
    rowid = sa.literal_column("rowid", sa.Integer)  # a row is written when its attempt begins, and keeps its place
    query = sa.select(attempts.c.record).order_by(rowid.desc()).limit(limit)
    if version is not None:
        query = query.where(attempts.c.version == version)
    if engine is not None:
        query = query.where(attempts.c.engine == engine)
    return [unpack(row, AttemptRecord) for row in reversed(connection.scalars(query).all())]


def count_attempts(connection: sa.Connection, version_ids: Sequence[str]) -> dict[str, int]:
    """How many attempts there were to bring engines to each of some versions, where there were any."""
    query = sa.select(attempts.c.version, sa.func.count()).where(attempts.c.version.in_(version_ids))
    return {row[0]: row[1] for row in connection.execute(query.group_by(attempts.c.version))}


def read_updates(connection: sa.Connection) -> list[UpdateRecord]:
    """The newest update of each run."""
    newest = sa.select(sa.func.max(updates.c.number)).group_by(updates.c.run)
    query = sa.select(updates.c.record).where(updates.c.number.in_(newest))
    return [unpack(row, UpdateRecord) for row in connection.scalars(query)]


def read_origin(connection: sa.Connection) -> Origin | None:
    """How the journal began; None in one that was never used."""
    row = connection.scalar(sa.select(origin.c.record))
    return None if row is None else unpack(row, Origin)
