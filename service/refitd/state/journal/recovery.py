"""Opening the journal at start: what happens when it is missing, corrupt, another release's, or cannot be read.

    sound       it is opened
    missing     on a new root a journal begins; on one that was in use one begins that is to be rebuilt
    corrupt     it is moved aside, never deleted, and one begins that is to be rebuilt
    older       its tables are others than this refitd's: as a corrupt one
    newer       refused: what this refitd does not understand it must not change
    unreadable  refused: a lock, a right or a failing disk says nothing about what is in it

To be rebuilt means: versions come back by the scan and are validated again, engines by the probe. Only the journal knew
what an engine holds, so its contents count as unknown until a full load is proved. What was decided (bars, pins,
pauses, which hub a host obeys) is in the root as well, and stands (`state/decisions.py`). Where that file is damaged
too, the start is refused: a version that was barred may be among those that would be loaded. Nothing is collected
until the root was listed and each engine asked.

    killed after                          the next start finds
    the old journal was moved aside       none, on a root that was in use: one begins again
    the next one was made                 a journal that ends before the root's decisions: it counts as corrupt
    the decisions were written into it    a sound journal

The root says where its journal is: `.refitd/journal` holds the path of the state folder. A journal that is not where it
is looked for was lost, or is looked for in the wrong place; an empty one would hide that. And where this file is, a
service has run on the root before.

It is opened for reading only where its condition is looked at: nothing that could be evidence is changed.
"""

import os
import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import assert_never
from uuid import uuid4

import sqlalchemy as sa
import structlog
from sqlalchemy.exc import DatabaseError

from refitd.clock import SystemClock
from refitd.root.ownership import StartRefusedError, mark_root, mounts_now
from refitd.root.scan import Listing, scan
from refitd.state.decisions import Decisions, decisions_path, read_decisions
from refitd.state.journal.database import JOURNAL_NAME, schema_of
from refitd.state.journal.journal import Journal
from refitd.state.journal.rows import JournalWrite, check_rows, put, read_last_event, read_origin
from refitd.state.journal.schema import SCHEMA_VERSION, RecordDamagedError, metadata
from refitd.state.records import NEW, Origin
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.contract.states import LogSeverity, VersionState
from refitd_client.contract.wire import Event
from refitd_client.files.durable import replace_file, sync_folder
from refitd_client.files.plain_file import read_plain

_ROLLBACK = "-journal"  # there only while a journal is made: until it is in WAL mode
SIDE_FILES = ("-wal", "-shm", _ROLLBACK)  # SQLite's own, beside the journal: https://sqlite.org/wal.html

# The last is what SQLite says where a statement does not fit the file: a column that is gone, an unknown file format.
_CORRUPT = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT, sqlite3.SQLITE_ERROR})
_LOCKED_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Missing:
    """There is none, or one that was never used. `leftovers` says that files of an earlier one lie there."""

    leftovers: bool = False


@dataclass(frozen=True, slots=True)
class Sound:
    """It can be read to its end. `last_event` is the number of the newest entry of its log."""

    origin: Origin
    last_event: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Corrupt:
    """It is not what was written."""

    reason: str


@dataclass(frozen=True, slots=True)
class Older:
    """An earlier refitd wrote it, with tables that this one does not read."""

    schema: int


@dataclass(frozen=True, slots=True)
class Newer:
    """A later refitd wrote it."""

    schema: int


@dataclass(frozen=True, slots=True)
class UnreadableJournal:
    """Its condition is not known: it is locked, may not be read, or its disk fails. That proves nothing."""

    reason: str


Condition = Missing | Sound | Corrupt | Older | Newer | UnreadableJournal


def examine_journal(path: Path, *, thorough: bool) -> Condition:
    """Look at the journal at `path`. `thorough` also decodes what no start reads (the event log)."""
    try:
        if not path.exists() or path.stat().st_size == 0 or path.with_name(path.name + _ROLLBACK).exists():
            return Missing(leftovers=any(path.with_name(path.name + side).exists() for side in SIDE_FILES))
        with reading(path) as connection:
            return _examine(connection, thorough=thorough)
    except (RecordDamagedError, UnicodeDecodeError) as error:  # SQLite's own texts may be what is damaged
        return Corrupt(str(error))
    except DatabaseError as error:
        return _condition_of(error.orig)
    except (OSError, sqlite3.DatabaseError) as error:
        return _condition_of(error)


@contextmanager
def reading(path: Path) -> Generator[sa.Connection]:
    """A connection that cannot change the journal."""

    def connect() -> sqlite3.Connection:
        # In a folder that may not be written, a journal that no process has open can only be read as immutable.
        alone = not any(path.with_name(path.name + side).exists() for side in SIDE_FILES)
        try:
            return _connect(path, "mode=ro")
        except sqlite3.OperationalError:
            if not alone:
                raise
            return _connect(path, "mode=ro&immutable=1")

    engine = sa.create_engine("sqlite://", creator=connect, poolclass=sa.NullPool)
    with engine.connect() as connection:
        yield connection


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, timeout=_LOCKED_SECONDS)
    try:
        with closing(connection.execute("PRAGMA schema_version")) as cursor:
            cursor.fetchone()  # opening reads nothing yet: this does
    except BaseException:
        connection.close()
        raise
    return connection


def _examine(connection: sa.Connection, *, thorough: bool) -> Condition:
    schema = schema_of(connection)
    if schema > SCHEMA_VERSION:
        return Newer(schema)
    # Indexes as well, which quick_check leaves out: by them a version is read back, or is not.
    faults = [row[0] for row in connection.exec_driver_sql("PRAGMA integrity_check(3)")]
    if faults != ["ok"]:
        return Corrupt("; ".join(faults))
    return Older(schema) if 0 < schema < SCHEMA_VERSION else _contents(connection, thorough=thorough)


def _contents(connection: sa.Connection, *, thorough: bool) -> Condition:
    schema_rows = connection.exec_driver_sql("SELECT type, name, tbl_name, sql FROM sqlite_master").all()
    tables = {name for type_, name, *_ in schema_rows if type_ == "table"}
    origin = read_origin(connection) if "origin" in tables else None
    if origin is None:
        return _without_origin(connection, tables)
    if missing := set(metadata.tables) - tables:
        return Corrupt(f"it has no table {', '.join(sorted(missing))}")
    check_rows(connection, with_log=thorough)
    return Sound(origin, read_last_event(connection))


def _without_origin(connection: sa.Connection, tables: set[str]) -> Condition:
    """A kill while a journal is made leaves empty tables; anything else has lost its beginning."""
    if foreign := tables - set(metadata.tables):
        return Corrupt(f"it is no journal of refitd: it has a table {min(foreign)}")
    for table in tables:
        if connection.execute(sa.select(metadata.tables[table]).limit(1)).first() is not None:
            return Corrupt("its first record is gone")
    return Missing()


def _condition_of(error: BaseException | None) -> Corrupt | UnreadableJournal:
    code = getattr(error, "sqlite_errorcode", None)
    # Extended codes have the primary one in their low byte. What has no code could be read, but not decoded.
    undecodable = code is None and isinstance(error, sqlite3.Error)
    damaged = undecodable or (code is not None and code & 0xFF in _CORRUPT)
    return Corrupt(str(error)) if damaged else UnreadableJournal(str(error))


FORGOTTEN = (
    "bars, pins and pauses stand as the root has them; versions are validated again, and every engine is loaded again; "
    "engines that were added by hand and versions that were announced with a path of their own may be gone; nothing is "
    "collected until the root was listed and every engine asked"
)

log = structlog.get_logger("refitd")

NOTE_NAME = "journal"
GROUP_NOTE = "postgresql:"  # and a group's name: what its root notes instead of a state folder

_PATH_MAX = 4096  # bytes of a path, PATH_MAX
_AHEAD = 1 << 32  # entries of the log, more than any journal got between two decisions


@dataclass(frozen=True, slots=True)
class Beginning:
    """What is written into a journal that begins now. One that is there already has an origin of its own."""

    origin: Origin = NEW
    writes: tuple[JournalWrite, ...] = ()


def open_journal(folder: Path, root: Path) -> Journal:
    """Open the journal in `folder` for the service of `root`, or begin one. Blocks. A StartRefusedError says why it
    must not or cannot be used, and what to do.
    """
    path = folder / JOURNAL_NAME
    try:
        begins = _beginning(path, root)
        journal = Journal(folder, begins.origin)
        try:
            journal.write_now(begins.writes)
            write_note(root, str(folder.resolve()))
        except BaseException:
            journal.close()
            raise
    except (OSError, sqlite3.Error, DatabaseError) as error:
        why = error.orig if isinstance(error, DatabaseError) else error
        raise StartRefusedError(
            f"the journal {path} cannot be used: {why}; the service needs to write it and its folder"
        ) from error
    return journal


def _beginning(path: Path, root: Path) -> Beginning:
    """How a journal at `path` begins, should there be none when this returns."""
    before = last_state_folder(root)
    if before is not None and str(before).startswith(GROUP_NOTE):
        raise StartRefusedError(
            f"the journal of {root} is in the database of a group: start with --state postgresql://…; if that is gone "
            f"for good, delete {root / SERVICE_FOLDER / NOTE_NAME}, and the journal is rebuilt from what is on disk"
        )
    condition = _with_its_end(examine_journal(path, thorough=False), root)
    match condition:
        case Sound():
            return Beginning()
        case Missing(leftovers):
            begins = _of_missing(path, root, before)
            if leftovers:  # SQLite would take them for those of the next journal
                move_aside(path)
            return begins
        case Corrupt(reason):
            return _instead(path, root, f"{path} was corrupt ({reason})")
        case Older(schema):
            return _instead(path, root, f"{path} has schema {schema}, and this refitd writes {SCHEMA_VERSION}")
        case Newer(schema):
            raise StartRefusedError(
                f"the journal {path} has schema {schema}, and this refitd knows {SCHEMA_VERSION}: start the newer "
                "refitd that wrote it; or move the file away, and it is rebuilt from what is on disk"
            )
        case UnreadableJournal(reason):
            raise StartRefusedError(f"the journal {path} cannot be read: {reason}; it is left as it is")
        case _:
            assert_never(condition)


def _with_its_end(condition: Condition, root: Path) -> Condition:
    """A sound journal is none if the root knows of decisions that came after its last entry."""
    if not isinstance(condition, Sound):
        return condition
    try:
        decisions = read_decisions(root)
    except RecordDamagedError as error:
        log.warning("the root's copy of decisions is damaged, and is written again", reason=str(error))
        return condition
    if decisions is None or decisions.event <= condition.last_event:
        return condition
    return Corrupt(f"it ends at entry {condition.last_event}, and the root knows of decisions at {decisions.event}")


def _of_missing(path: Path, root: Path, before: Path | None) -> Beginning:
    mark = mark_root(root, None, has_versions=False, mounts=mounts_now())
    if before is None:
        listing = scan(root)
        if isinstance(listing, Listing) and not listing.found:
            return Beginning(replace(NEW, root=mark))
        cause = f"{path} was not there, and {root} has versions already"
        return Beginning(Origin(cause=cause, rebuilt=False, root=mark))
    if before != path.parent.resolve() and (before / JOURNAL_NAME).exists():
        raise StartRefusedError(
            f"the journal of {root} is in {before}, and there is none in {path.parent}: start with --state {before}, "
            f"or move {JOURNAL_NAME}* from there to {path.parent}"
        )
    return rebuilt_from(root, f"{path} was not there, and a service has run on {root} before")


def _instead(path: Path, root: Path, why: str) -> Beginning:
    """How the next journal begins, after the one at `path` was moved aside."""
    begins = rebuilt_from(root, f"{why}; it is {_free_name(path).name} now")
    move_aside(path)
    return begins


def rebuilt_from(root: Path, cause: str) -> Beginning:
    """How a journal begins in the place of one that is lost: with what was decided, as the root has it. Blocks. Where
    the root's copy of the decisions is damaged too, the start is refused.
    """
    try:
        decisions = read_decisions(root) or Decisions()
    except RecordDamagedError as error:
        kept = decisions_path(root)
        raise StartRefusedError(
            f"the journal is lost or damaged, and so is {kept}: what was barred or pinned is not known; "
            f"move {kept.name} away, and the service starts without bars and pins"
        ) from error
    log.error("the journal was lost and is rebuilt", reason=cause, consequence=FORGOTTEN)
    entry = _entry(decisions.event + _AHEAD, cause)
    versions = map(_to_be_validated, decisions.versions)
    writes = tuple(map(put, (*versions, *decisions.updates, *decisions.runs, entry)))
    mark = mark_root(root, None, has_versions=False, mounts=mounts_now())
    return Beginning(Origin(cause=cause, lost=True, rebuilt=False, root=mark, lead=decisions.lead), writes)


def _to_be_validated(version: VersionRecord) -> VersionRecord:
    is_good = version.state is VersionState.SEALED and not version.handed
    return replace(version, state=VersionState.ANNOUNCED) if is_good else version


def _entry(number: int, cause: str) -> Event:
    """The log says what happened. It goes on behind each entry that somebody may have read of the lost one."""
    return Event(
        seq=number,
        at=SystemClock().now(),
        kind="journal",
        subject="journal",
        text=f"rebuilding: {cause}",
        data={},
        severity=LogSeverity.WARNING,
    )


def last_state_folder(root: Path) -> Path | None:
    """The state folder of the service that ran on `root` last; None where none has."""
    try:
        return Path(os.fsdecode(read_plain(root / SERVICE_FOLDER / NOTE_NAME, _PATH_MAX)).strip())
    except FileNotFoundError:
        return None


def write_note(root: Path, note: str) -> None:
    """Write down where the journal of a root is, durably."""
    with suppress(OSError):
        if str(last_state_folder(root)) == note:
            return
    own = root / SERVICE_FOLDER
    replace_file(own / NOTE_NAME, os.fsencode(f"{note}\n"), by=own / f"journal-{uuid4().hex}")


def move_aside(path: Path) -> Path:
    """Rename the journal to `journal.db.aside-<n>`, its side files with it; return the new name.

    The journal goes first: a kill in between leaves side files without a journal, which the next start moves as well.
    The other way round the journal would be left without its last writes, and could look sound.
    """
    names, aside = [path.name, *(path.name + side for side in SIDE_FILES)], _free_name(path)
    for name in names:
        source = path.with_name(name)
        if source.exists():
            source.rename(aside.with_name(aside.name + name.removeprefix(path.name)))
    sync_folder(path.parent)
    return aside


def _free_name(path: Path) -> Path:
    return next(path.with_name(f"{path.name}.aside-{n}") for n in count(1) if _is_free(path, n))


def _is_free(path: Path, n: int) -> bool:
    return not any(path.with_name(f"{path.name}.aside-{n}{side}").exists() for side in ("", *SIDE_FILES))
