"""What can be asked of the journal. Each function takes a connection, so that a caller can ask several in one go.

Each raises RecordDamagedError where a record is not what was written; those of the log show it in its place.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from refitd.state.journal.schema import (
    RecordDamagedError,
    attempts,
    engines,
    events,
    fingerprints,
    open_text,
    origin,
    runs,
    unpack,
    updates,
    versions,
)
from refitd.state.log_entry import EVERYTHING, LogFilter
from refitd.state.records import AttemptRecord, EngineRecord, Origin, RunRecord, UpdateRecord
from refitd.state.version import VersionRecord
from refitd.state.version_index import Row
from refitd_client.contract.states import LogSeverity, VersionState
from refitd_client.contract.wire import Event

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
    """One version."""
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
        connection: of the journal.
        before: what came before this event; None for the newest.
        limit: entries on a page.
        subject: only those about this.
        wanted: which of these.
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
