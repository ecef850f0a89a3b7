"""What can still be read of a damaged journal, as what begins the next one.

A copy is read, row by row: what SQLite can reach, from the first row on and from the last one back, and by number what
lies between. A row counts if its record's checksum fits; its other columns are written again after the record, and so
are all indexes. What was decided about versions, updates and runs is in the root as well (`state/decisions.py`).
"""

import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import sqlalchemy as sa

from refitd.state.decisions import Decisions, with_decision
from refitd.state.journal.schema import RecordDamagedError, attempts, engines, fingerprints, metadata, open_text, unpack
from refitd.state.journal.writes import (
    RECORDS,
    JournalWrite,
    put_attempt,
    put_engine,
    put_event,
    put_fingerprint,
    put_run,
    put_update,
    put_version,
)
from refitd.state.records import AttemptRecord, EngineRecord, RunRecord, UpdateRecord, unvouched
from refitd.state.version import VersionRecord
from refitd.state.version_index import ListOrder
from refitd_client.contract.states import VersionState
from refitd_client.contract.wire import Event

_LOOKED_FOR = 100_000  # rows that are looked for by number between those that were found
_HEADER = 100  # bytes: https://sqlite.org/fileformat2.html
_PAGE_COUNT, _FREE_PAGES = slice(28, 32), slice(32, 40)


@dataclass(frozen=True, slots=True)
class Salvaged:
    """What begins the next journal. `text` says what was kept and what is lost. `last_event` is the number of
    the newest entry of the log of which anything is known. `knows_engines`: nothing is lost of what the journal knew of
    them and of their loads.
    """

    writes: tuple[JournalWrite, ...]
    text: str
    last_event: int
    knows_engines: bool


def nothing_but(decisions: Decisions | None) -> Salvaged:
    """What begins a journal where none is left."""
    return _begin(_Found(), decisions or Decisions())


def salvage(path: Path, decisions: Decisions | None, *, copy: Path, sound: bytes) -> Salvaged:
    """Read what is left of the journal at `path`, which stays as it is.

    Args:
        path: the journal.
        decisions: what the root says of decisions, None where it says nothing.
        copy: where a copy may be made of it, beside which nothing else lies.
        sound: the beginning of any sound journal.

    Raises:
        OSError: the copy cannot be made.
    """
    for side in ("", "-wal"):
        if path.with_name(path.name + side).exists():
            shutil.copyfile(path.with_name(path.name + side), copy.with_name(copy.name + side))
    found = _read(copy)
    if found.kept == 0 and copy.stat().st_size > _HEADER:  # a header that says another page size hides all that follows
        _give_header(copy, sound)
        found = _read(copy)
    return _begin(found, decisions or Decisions())


class _Found:
    """Rows that are sound, and how many of each table are not."""

    def __init__(self) -> None:
        self.records: dict[type, list[Any]] = {kind: [] for kind, _ in RECORDS.values()}
        self.places: dict[str, int] = {}
        self.fingerprints: list[tuple[str, str, str]] = []
        self.lost: Counter[str] = Counter()
        self.unreadable: set[str] = set()
        self.has_sound_pages = False

    @property
    def kept(self) -> int:
        return len(self.fingerprints) + sum(map(len, self.records.values()))

    def take(self, table: sa.Table, row: Mapping[str, Any]) -> None:
        """Raises RecordDamagedError: the row is not sound."""
        if table is fingerprints:
            keys = row["version"], row["configuration"]
            self.fingerprints.append((*keys, open_text(row["fingerprint"], *keys)))
        elif table in RECORDS:
            kind = RECORDS[table][0]
            record = cast("object", unpack(row["record"], kind))
            self.records[kind].append(record)
            if isinstance(record, VersionRecord) and isinstance(row.get("place"), int):
                self.places[record.id] = row["place"]

    @property
    def text(self) -> str:
        lost = [f"{count} of {name}" for name, count in sorted(self.lost.items())]
        lost += [f"an unknown number of {name}" for name in sorted(self.unreadable)]
        return f"{self.kept} rows are kept; lost: {', '.join(lost) or 'none'}"


def _read(copy: Path) -> _Found:
    found = _Found()
    with suppress(sqlite3.Error), closing(sqlite3.connect(copy)) as connection:
        found.has_sound_pages = connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    for table in metadata.sorted_tables:
        called = table.info.get("called", table.name)
        try:
            with closing(sqlite3.connect(copy, isolation_level=None)) as connection:
                connection.text_factory = partial(str, encoding="utf-8", errors="replace")
                connection.execute("PRAGMA writable_schema=ON")  # a damaged table hides no other one
                rows, is_whole = _rows(connection, table.name)
        except sqlite3.Error:
            rows, is_whole = [], False
        if not is_whole:
            found.unreadable.add(called)
        for row in rows:
            try:
                found.take(table, dict(zip(table.columns.keys(), row, strict=False)))
            except (RecordDamagedError, KeyError):
                found.lost[called] += 1
    return found


def _rows(connection: sqlite3.Connection, table: str) -> tuple[list[tuple[Any, ...]], bool]:
    """The rows of a table in the order in which they were written, and whether these are all."""
    select = f"SELECT rowid, * FROM {table} NOT INDEXED"  # noqa: S608 - the name is our own
    found = dict[int, tuple[Any, ...]]()

    def collect(rows: Iterable[tuple[Any, ...]]) -> bool:
        try:
            for number, *row in rows:
                found[number] = tuple(row)
        except sqlite3.Error:
            return False
        return True

    if collect(connection.execute(f"{select} ORDER BY rowid")):
        return list(found.values()), True
    first = max(found, default=0)
    with suppress(sqlite3.Error):
        collect(connection.execute(f"{select} WHERE rowid > ? ORDER BY rowid DESC", (first,)))
    last = min((number for number in found if number > first), default=first)
    for number in range(first + 1, min(last, first + _LOOKED_FOR)):
        with suppress(sqlite3.Error):
            collect(connection.execute(f"{select} WHERE rowid = ?", (number,)))
    return [found[number] for number in sorted(found)], False


def _give_header(copy: Path, sound: bytes) -> None:
    header = bytearray(sound[:_HEADER])
    header[_PAGE_COUNT] = (copy.stat().st_size // int.from_bytes(header[16:18])).to_bytes(4)
    header[_FREE_PAGES] = bytes(8)
    with copy.open("r+b") as file:
        file.write(header)


def _begin(found: _Found, decisions: Decisions) -> Salvaged:
    events: list[Event] = found.records[Event]
    last_event = max((event.seq for event in events), default=0)
    ends_early = last_event < decisions.event
    damaged = found.unreadable.union(found.lost)
    knows_engines = found.has_sound_pages and not ends_early and not damaged & {engines.name, attempts.name}
    versions: dict[str, VersionRecord] = {version.id: version for version in found.records[VersionRecord]}
    for decided in map(_to_be_validated, decisions.versions):  # others than the service may write that file
        kept = versions.get(decided.id, decided)
        versions[decided.id] = with_decision(with_decision(decided if ends_early else kept, kept), decided)
    places = ListOrder()
    for id_, place in found.places.items():
        order = versions[id_].order
        places.remember(versions[id_].run, (order.generation, order.step, place))
    updates: list[UpdateRecord] = found.records[UpdateRecord]
    newest = {update.run: update.number for update in sorted(updates, key=lambda each: each.number)}
    runs: dict[str, RunRecord] = {run.run: run for run in decisions.runs}
    if not ends_early:
        runs |= {run.run: run for run in found.records[RunRecord]}
    judged = versions.values() if knows_engines else map(_to_be_validated, versions.values())
    oldest_first = sorted(judged, key=lambda version: version.order)
    writes = [
        *(put_version(version, places.of(version.run, version.order)) for version in oldest_first),
        *(put_engine(engine if knows_engines else unvouched(engine)) for engine in found.records[EngineRecord]),
        *map(put_attempt, found.records[AttemptRecord]),
        *map(put_update, updates),
        *(put_update(each) for each in decisions.updates if each.number >= newest.get(each.run, 0)),
        *map(put_run, runs.values()),
        *map(put_event, events),
        *(put_fingerprint(*each) for each in found.fingerprints),
    ]
    return Salvaged(tuple(writes), found.text, max(last_event, decisions.event), knows_engines)


def _to_be_validated(version: VersionRecord) -> VersionRecord:
    is_good = version.state is VersionState.SEALED and not version.handed
    return replace(version, state=VersionState.ANNOUNCED) if is_good else version
