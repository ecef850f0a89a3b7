"""What can be written to the journal, one statement each.

"Insert, or update what is there" is no standard SQL: each statement is made for the dialect of its connection.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
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
    origin,
    pack,
    runs,
    seal_text,
    unpack,
    updates,
    versions,
)
from refitd.state.records import AttemptRecord, EngineRecord, Origin, RunRecord, UpdateRecord
from refitd.state.version import VersionRecord
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
    """Write an engine as it is now."""
    return _upsert(engines, id=record.id, record=pack(record))


def drop_engine(engine_id: str) -> JournalWrite:
    """Forget an engine."""
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
    """Write an update as it is now."""
    return _upsert(updates, number=record.number, run=record.run, version=record.version, record=pack(record))


def put_run(record: RunRecord) -> JournalWrite:
    """Write what is known of a run."""
    return _upsert(runs, run=record.run, record=pack(record))


def put_event(record: Event) -> JournalWrite:
    """Add to the log."""
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
