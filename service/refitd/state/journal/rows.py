"""What can be asked of the journal, and what can be written to it.

Each function that reads takes a connection, so that a caller can ask several in one go. Each raises RecordDamagedError
where a record is not what was written; those of the log show it in its place.

Each write is one statement. "Insert, or update what is there" is no standard SQL: each statement is made for the
dialect of its connection.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

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
    open_text,
    origin,
    pack,
    runs,
    seal_text,
    unpack,
    updates,
    versions,
)
from refitd.state.observer import EVERYTHING, LogFilter
from refitd.state.records import AttemptRecord, EngineRecord, Origin, RunRecord, UpdateRecord
from refitd.state.version import VersionRecord
from refitd.state.version_index import Row
from refitd_client.contract.states import LogSeverity, VersionState
from refitd_client.contract.wire import Event

Insert: TypeAlias = sqlite.Insert | postgresql.Insert
_INSERT: dict[str, Callable[[sa.Table], Insert]] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


@dataclass(frozen=True, slots=True)
class JournalWrite:
    """One statement, by the name of a dialect, with its values.

    Statements are made once for each dialect: making one takes longer than running it.

    Attributes:
        statement: makes it.
        values: its values.
        is_told: whether followers, trainers and people act on it: a version, an update or a run. Engines are not waited
            for by those who only read: in an update of a thousand, thousands of their writes wait for the disk.
        event: the number of the entry of the log that it writes.
    """

    statement: Callable[[str], UpdateBase]
    values: dict[str, Any]
    is_told: bool = False
    event: int | None = None

    def carry_out(self, connection: sa.Connection) -> None:
        """Run it.

        Raises:
            sqlalchemy.exc.DatabaseError: it fails.
        """
        connection.execute(self.statement(connection.dialect.name), self.values)


def in_few_statements(batch: Iterable[JournalWrite], dialect: str) -> Iterator[tuple[UpdateBase, list[dict[str, Any]]]]:
    """The same writes as statements with many values each, in what order leaves the database the same.

    What is written to one table stays in order; tables do not look at each other. A statement is a tenth of a
    millisecond of a processor, whose values take a tenth of that: an update of a thousand engines is ten thousand.

    Args:
        batch: the writes, in order. They are carried out in one transaction.
        dialect: the name of the database's.
    """
    grouped = _by_table(batch, dialect)
    return (_in_one_text(*each) for each in grouped) if dialect == "sqlite" else grouped


def _by_table(batch: Iterable[JournalWrite], dialect: str) -> Iterator[tuple[UpdateBase, list[dict[str, Any]]]]:
    waiting: dict[Any, tuple[UpdateBase, list[dict[str, Any]]]] = {}
    for write in batch:
        statement = write.statement(dialect)
        table = statement.table
        if table in waiting and waiting[table][0] is not statement:
            yield waiting.pop(table)
        waiting.setdefault(table, (statement, []))[1].append(write.values)
    yield from waiting.values()


def _in_one_text(statement: UpdateBase, rows: list[dict[str, Any]]) -> tuple[UpdateBase, list[dict[str, Any]]]:
    """The same rows as one text, where they are many that are put, for SQLite.

    Its driver takes the interpreter's lock again after each row, and the event loop has that most of the time. A
    statement that finds its rows in a text runs to its end without it.
    """
    table = statement.table
    if len(rows) == 1 or statement is not _upsert_into(table)("sqlite"):
        return statement, rows
    names = table.columns.keys()
    text = msgspec.json.encode([[_as_text(row[name]) for name in names] for row in rows]).decode()
    if "\\u0000" in text:  # SQLite before 3.45 ends a string there
        return statement, rows
    return _upsert_of_text(table), [{"rows": text}]


def _as_text(value: object) -> object:
    return value.decode() if isinstance(value, bytes) else value


@cache
def _upsert_of_text(table: sa.Table) -> UpdateBase:
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


@cache
def _upsert_into(table: sa.Table) -> Callable[[str], UpdateBase]:
    @cache
    def statement(dialect: str) -> UpdateBase:
        return _or_update(table, _INSERT[dialect](table))

    return statement


def _or_update(table: sa.Table, insert: Insert) -> UpdateBase:
    others = {column.name: insert.excluded[column.name] for column in table.columns if not column.primary_key}
    return insert.on_conflict_do_update(index_elements=list(table.primary_key), set_=others)


_TOLD = frozenset({versions, updates, runs})


def _upsert(table: sa.Table, **values: Any) -> JournalWrite:
    return JournalWrite(_upsert_into(table), values, is_told=table in _TOLD)


_DROP_FINGERPRINTS = sa.delete(fingerprints).where(fingerprints.c.version == sa.bindparam("of_version"))
_DROP_ENGINE = sa.delete(engines).where(engines.c.id == sa.bindparam("engine_id"))


def put_version(record: VersionRecord, place: int) -> JournalWrite:
    """Write a version as it is now, with its place in lists."""
    return _upsert(
        versions,
        id=record.id,
        run=record.run,
        generation=record.order.generation,
        step=record.order.step,
        state=record.state.value,
        record=pack(record),
        place=place,
    )


def put_engine(record: EngineRecord) -> JournalWrite:
    return _upsert(engines, id=record.id, record=pack(record))


def drop_engine(engine_id: str) -> JournalWrite:
    return JournalWrite(lambda _: _DROP_ENGINE, {"engine_id": engine_id})


def put_attempt(record: AttemptRecord) -> JournalWrite:
    """Write an attempt as it is now: first open, later closed."""
    return _upsert(
        attempts,
        id=record.id,
        engine=record.engine,
        version=record.version,
        outcome=record.outcome,
        record=pack(record),
    )


def put_fingerprint(version: str, configuration: str, fingerprint: str) -> JournalWrite:
    """Record what a clean load of a version gave."""
    sealed = seal_text(fingerprint, version, configuration)
    return _upsert(fingerprints, version=version, configuration=configuration, fingerprint=sealed)


def drop_fingerprints(version: str) -> JournalWrite:
    """Forget what clean loads of a version gave."""
    return JournalWrite(lambda _: _DROP_FINGERPRINTS, {"of_version": version})


def put_update(record: UpdateRecord) -> JournalWrite:
    return _upsert(updates, number=record.number, run=record.run, version=record.version, record=pack(record))


def put_run(record: RunRecord) -> JournalWrite:
    return _upsert(runs, run=record.run, record=pack(record))


def put_event(record: Event) -> JournalWrite:
    values = {"seq": record.seq, "subject": record.subject, "record": pack(record)}
    return JournalWrite(_upsert_into(events), values, event=record.seq)


def put_origin(record: Origin) -> JournalWrite:
    """Write how the journal began, and whether it is rebuilt."""
    return _upsert(origin, id=1, record=pack(record))


def _put_version_row(record: VersionRecord, row: Mapping[str, Any]) -> JournalWrite:
    if not isinstance(row["place"], int):
        raise RecordDamagedError(f"a row of {VersionRecord.__name__} is damaged: its place is no number")
    return put_version(record, row["place"])


def _plain(put: Callable[[Any], JournalWrite]) -> Callable[[Any, Mapping[str, Any]], JournalWrite]:
    return lambda record, _: put(record)


# Of each table whose rows are records: of what kind they are, and what writes one again, with the columns that it has.
RECORDS: Mapping[sa.Table, tuple[type, Callable[[Any, Mapping[str, Any]], JournalWrite]]] = {
    versions: (VersionRecord, _put_version_row),
    engines: (EngineRecord, _plain(put_engine)),
    attempts: (AttemptRecord, _plain(put_attempt)),
    updates: (UpdateRecord, _plain(put_update)),
    runs: (RunRecord, _plain(put_run)),
    events: (Event, _plain(put_event)),
}


def row_again(table: sa.Table, row: Mapping[str, Any]) -> JournalWrite:
    """What writes a row of the journal again, after its record.

    Raises:
        RecordDamagedError: the row is not what was written: its record, or a column that says other than it.
    """
    kind, put = RECORDS[table]
    write = put(unpack(row["record"], kind), row)
    for name, value in write.values.items():
        if name != "record" and row[name] != value:
            raise RecordDamagedError(f"a record of {kind.__name__} says {value!r} where its row says {row[name]!r}")
    return write


LOOKED_AT = 5000  # entries of the log that one page with a filter reads: a page takes tens of milliseconds at most
_ROWS = 500


def read_versions(
    connection: sa.Connection,
    *,
    run: str | None = None,
    state: VersionState | None = None,
    before: tuple[int, int, int] | None = None,
    limit: int | None = None,
) -> list[VersionRecord]:
    """Versions, newest first; `before` is the (place, generation, step) that the last page ended with."""
    parts = (versions.c.place, versions.c.generation, versions.c.step)
    key = sa.tuple_(*parts)
    query = sa.select(versions.c.record).order_by(*(part.desc() for part in parts))
    if run is not None:
        query = query.where(versions.c.run == run)
    if state is not None:
        query = query.where(versions.c.state == state.value)
    if before is not None:
        query = query.where(key < sa.tuple_(*(sa.literal(part) for part in before)))
    return [unpack(row, VersionRecord) for row in connection.scalars(query.limit(limit))]


def read_places(connection: sa.Connection) -> list[tuple[str, Row]]:
    """The place of each version in lists, with its run, generation and step."""
    rows = connection.execute(sa.select(versions.c.run, versions.c.generation, versions.c.step, versions.c.place))
    found = [(run, (generation, step, place)) for run, generation, step, place in rows]
    if not all(isinstance(number, int) for _, row in found for number in row):
        raise RecordDamagedError("a row of VersionRecord is damaged: its place is no number")
    return found


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

    Args:
        before: what came before this event; None for the newest.
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


def read_engines(connection: sa.Connection) -> list[EngineRecord]:
    """All engines that the service knew when it last wrote."""
    return [engine for engine in _engines(connection) if not engine.naming.removed]


def read_removed_engines(connection: sa.Connection) -> list[EngineRecord]:
    """What must stay known of engines that are named no more; each one's id is its address."""
    return [engine for engine in _engines(connection) if engine.naming.removed]


def _engines(connection: sa.Connection) -> Iterator[EngineRecord]:
    return (unpack(row, EngineRecord) for row in connection.scalars(sa.select(engines.c.record)))


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


def read_fingerprints(connection: sa.Connection) -> list[tuple[str, str, str]]:
    """What clean loads gave, as (version, configuration, fingerprint)."""
    rows = connection.execute(sa.select(fingerprints))
    return [
        (row.version, row.configuration, open_text(row.fingerprint, row.version, row.configuration)) for row in rows
    ]


def read_updates(connection: sa.Connection) -> list[UpdateRecord]:
    """The newest update of each run."""
    newest = sa.select(sa.func.max(updates.c.number)).group_by(updates.c.run)
    query = sa.select(updates.c.record).where(updates.c.number.in_(newest))
    return [unpack(row, UpdateRecord) for row in connection.scalars(query)]


def read_runs(connection: sa.Connection) -> list[RunRecord]:
    """The runs of which more is known than their versions."""
    return [unpack(row, RunRecord) for row in connection.scalars(sa.select(runs.c.record))]


def read_origin(connection: sa.Connection) -> Origin | None:
    """How the journal began; None in one that was never used."""
    row = connection.scalar(sa.select(origin.c.record))
    return None if row is None else unpack(row, Origin)
