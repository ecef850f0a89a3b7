"""Opening the journal at start: what happens when it is missing, corrupt, newer than this refitd, or cannot be read.

    sound       it is opened; one of an older refitd is brought to this one's schema first, and a copy kept
    missing     on a new root a journal begins; on one that was in use an empty one begins, to be rebuilt
    corrupt     it is moved aside, never deleted, and one begins that has the rows that are sound, to be rebuilt
    newer       refused: what this refitd does not understand it must not change
    unreadable  refused: a lock, a right or a failing disk says nothing about what is in it

To be rebuilt means: versions come back by the scan and are validated again, engines by the probe. Only the journal knew
what an engine holds, so where something of that is lost, its contents count as unknown until a full load is proved.
What was decided (bars, pins, pauses) is in the root as well, and stands (`state/decisions.py`). Where that file is
damaged too, the start is refused: a version that was barred may be among those that would be loaded. Nothing is
collected until the root was listed and each engine asked.

The next journal is complete before the damaged one is moved aside, and then takes its name. A kill in between leaves it
as `journal.db.salvaged`, which the next start gives the name.

The root says where its journal is: `.refitd/journal` holds the path of the state folder. A journal that is not where it
is looked for was lost, or is looked for in the wrong place; an empty one would hide that. And where this file is, a
service has run on the root before.
"""

import os
import shutil
import sqlite3
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import assert_never
from uuid import uuid4

import structlog
from sqlalchemy.exc import DatabaseError

from refitd.clock import SystemClock
from refitd.root.file_systems import mounts_now
from refitd.root.mark import mark_root
from refitd.root.ownership import StartRefusedError
from refitd.root.scan import Listing, scan
from refitd.state.decisions import Decisions, decisions_path, read_decisions
from refitd.state.journal.address import GROUP_NOTE
from refitd.state.journal.condition import (
    SIDE_FILES,
    Condition,
    Corrupt,
    Missing,
    Newer,
    Sound,
    UnreadableJournal,
    examine_journal,
)
from refitd.state.journal.copies import copy_of
from refitd.state.journal.journal import Journal
from refitd.state.journal.migrate import MigrationError, is_older, migrate
from refitd.state.journal.salvage import Salvaged, nothing_but, salvage
from refitd.state.journal.schema import SCHEMA_VERSION, RecordDamagedError
from refitd.state.journal.sqlite_file import JOURNAL_NAME
from refitd.state.journal.writes import put_event
from refitd.state.records import NEW, Origin
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.contract.states import LogSeverity
from refitd_client.contract.wire import Event
from refitd_client.files.durable import replace_file, sync_folder
from refitd_client.files.plain_file import read_plain

FORGOTTEN = (
    "bars, pins and pauses stand as the root has them; versions whose records are lost are validated again, and every "
    "engine is loaded again where its record may be lost; engines that were added by hand and versions that were "
    "announced with a path of their own may be gone; nothing is collected until the root was listed and every engine "
    "asked"
)

log = structlog.get_logger("refitd")

NOTE_NAME = "journal"

_PATH_MAX = 4096  # bytes of a path, PATH_MAX


def open_journal(folder: Path, root: Path, *, thorough: bool = False) -> Journal:
    """Open the journal in `folder` for the service of `root`, or begin one. Blocks.

    Args:
        folder: the folder of state.
        root: the root.
        thorough: a journal of which only entries of the log are damaged is salvaged too. A start leaves it as it is.

    Raises:
        StartRefusedError: it must not or cannot be used; the message says why and what to do.
    """
    path = folder / JOURNAL_NAME
    try:
        journal = Journal(folder, _origin(path, root, thorough=thorough))
        note_state_folder(root, folder)
    except (OSError, sqlite3.Error, DatabaseError) as error:
        why = error.orig if isinstance(error, DatabaseError) else error
        raise StartRefusedError(
            f"the journal {path} cannot be used: {why}; the service needs to write it and its folder"
        ) from error
    return journal


def _origin(path: Path, root: Path, *, thorough: bool) -> Origin:
    """What is written into a journal at `path` that begins now, about the root as it is."""
    before = last_state_folder(root)
    if before is not None and str(before).startswith(GROUP_NOTE):
        raise StartRefusedError(
            f"the journal of {root} is in the database of a group: start with --state postgresql://…; if that is gone "
            f"for good, delete {root / SERVICE_FOLDER / NOTE_NAME}, and the journal is rebuilt from what is on disk"
        )
    _finish_salvage(path)
    origin = _began(path, root, thorough=thorough)
    if path.exists():
        return origin  # it knows its root, which may be away now
    return _of_root(origin, root)


def _of_root(origin: Origin, root: Path) -> Origin:
    return replace(origin, root=mark_root(root, None, has_versions=False, mounts=mounts_now()))


def _began(path: Path, root: Path, *, thorough: bool) -> Origin:
    """How a journal at `path` begins, should there be none when this returns."""
    condition = _with_its_end(examine_journal(path, thorough=thorough), root)
    match condition:
        case Sound(schema=schema):
            _bring_up(path, schema)
            return NEW  # it has one
        case Missing(leftovers):
            origin = _of_missing(path, root)
            if origin.lost:
                _begin_anew(path, root, nothing_but(_decisions(path, root)), origin.cause or "it was not there")
            elif leftovers:
                move_aside(path)
            return origin
        case Corrupt(reason):
            decisions = _decisions(path, root)
            copy = _workplace(path) / "damaged"
            salvaged = salvage(path, decisions, copy=copy, sound=_sound_header(copy.parent / "header"))
            _begin_anew(path, root, salvaged, f"{path} was corrupt ({reason})")
            return NEW
        case Newer(schema):
            raise StartRefusedError(_too_new(path, schema))
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


def _decisions(path: Path, root: Path) -> Decisions | None:
    try:
        return read_decisions(root)
    except RecordDamagedError as error:
        kept = decisions_path(root)
        raise StartRefusedError(
            f"the journal {path} is lost or damaged, and so is {kept}: what was barred or pinned is not known; "
            f"move {kept.name} away, and the service starts without bars and pins"
        ) from error


def _begin_anew(path: Path, root: Path, salvaged: Salvaged, why: str) -> None:
    """Put a journal that has what was salvaged in the place of the one at `path`, which is moved aside."""
    aside = _free_name(path)
    cause = (
        f"{why}; what is left of it is {aside.name}; {salvaged.text}" if path.exists() else f"{why}; {salvaged.text}"
    )
    origin = _of_root(Origin(cause=cause, lost=not salvaged.knows_engines, rebuilt=False), root)
    log.error("the journal was lost and is rebuilt", reason=cause, consequence=FORGOTTEN)
    place = _workplace(path)
    journal = Journal(place / "next", origin)
    try:
        journal.write_now([*salvaged.writes, put_event(_entry(salvaged.last_event + 1, cause))])
    finally:
        journal.close()
    (place / "next" / JOURNAL_NAME).rename(_salvaged(path))
    sync_folder(path.parent)
    move_aside(path)
    _finish_salvage(path)


def _entry(number: int, cause: str) -> Event:
    """The log goes on behind what anybody has read of it, and says what happened."""
    return Event(
        seq=number,
        at=SystemClock().now(),
        kind="journal",
        subject="journal",
        text=f"rebuilding: {cause}",
        data={},
        severity=LogSeverity.WARNING,
    )


def _finish_salvage(path: Path) -> None:
    """Give a salvaged journal its name. One that is there beside the damaged one is made again."""
    shutil.rmtree(path.with_name(f"{path.name}.salvaging"), ignore_errors=True)  # of a start that was killed there
    salvaged = _salvaged(path)
    if not salvaged.exists():
        return
    if path.exists():
        salvaged.unlink()
        return
    if any(path.with_name(path.name + side).exists() for side in SIDE_FILES):
        move_aside(path)  # SQLite would take them for those of the next one
    salvaged.rename(path)
    sync_folder(path.parent)


def _salvaged(path: Path) -> Path:
    return path.with_name(f"{path.name}.salvaged")


def _workplace(path: Path) -> Path:
    place = path.with_name(f"{path.name}.salvaging")
    for folder in (path.parent, place):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return place


def _sound_header(folder: Path) -> bytes:
    Journal(folder).close()
    return (folder / JOURNAL_NAME).read_bytes()


def _bring_up(path: Path, schema: int) -> None:
    """Bring a sound journal to this refitd's schema, if it has an older one."""
    if not is_older(schema):
        return
    try:
        kept = migrate(path, schema)
    except MigrationError as error:
        raise StartRefusedError(
            f"the journal {path} has schema {schema} and cannot be brought to {SCHEMA_VERSION}: "
            f"{error}; it is as it was, and the refitd that wrote it can go on with it"
        ) from error
    log.info("the journal has a new schema", before=schema, now=SCHEMA_VERSION, copy=str(kept))


def _too_new(path: Path, schema: int) -> str:
    start = f"the journal {path} has schema {schema}, and this refitd knows {SCHEMA_VERSION}: start the newer refitd"
    kept = copy_of(path, SCHEMA_VERSION)
    if kept.exists():
        return f"{start} that wrote it; or go back to what was before it: move {path}* away, and {kept} to {path.name}"
    return f"{start} that wrote it; or move the file away, and it is rebuilt from what is on disk"


def _of_missing(path: Path, root: Path) -> Origin:
    before = last_state_folder(root)
    if before is None:
        listing = scan(root)
        if isinstance(listing, Listing) and not listing.found:
            return NEW
        return Origin(cause=f"{path} was not there, and {root} has versions already", rebuilt=False)
    if before != path.parent.resolve() and (before / JOURNAL_NAME).exists():
        raise StartRefusedError(
            f"the journal of {root} is in {before}, and there is none in {path.parent}: start with --state {before}, "
            f"or move {JOURNAL_NAME}* from there to {path.parent}"
        )
    cause = f"{path} was not there, and a service has run on {root} before"
    return Origin(cause=cause, lost=True, rebuilt=False)


def last_state_folder(root: Path) -> Path | None:
    """The state folder of the service that ran on `root` last; None where none has.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        return Path(os.fsdecode(read_plain(root / SERVICE_FOLDER / NOTE_NAME, _PATH_MAX)).strip())
    except FileNotFoundError:
        return None


def note_state_folder(root: Path, folder: Path) -> None:
    """Write it down, durably.

    Raises:
        OSError: it cannot be written.
    """
    write_note(root, str(folder.resolve()))


def write_note(root: Path, note: str) -> None:
    """Write down where the journal of a root is, durably.

    Raises:
        OSError: it cannot be written.
    """
    with suppress(OSError):
        if str(last_state_folder(root)) == note:
            return
    own = root / SERVICE_FOLDER
    replace_file(own / NOTE_NAME, os.fsencode(f"{note}\n"), by=own / f"journal-{uuid4().hex}")


def move_aside(path: Path) -> Path:
    """Rename the journal to `journal.db.corrupt-<n>`, its side files with it; return the new name.

    The journal goes first: a kill in between leaves side files without a journal, which the next start moves as well.
    The other way round the journal would be left without its last writes, and could look sound.

    Raises:
        OSError: it cannot be renamed.
    """
    names, aside = [path.name, *(path.name + side for side in SIDE_FILES)], _free_name(path)
    for name in names:
        source = path.with_name(name)
        if source.exists():
            source.rename(aside.with_name(aside.name + name.removeprefix(path.name)))
    sync_folder(path.parent)
    return aside


def _free_name(path: Path) -> Path:
    return next(path.with_name(f"{path.name}.corrupt-{n}") for n in count(1) if _is_free(path, n))


def _is_free(path: Path, n: int) -> bool:
    return not any(path.with_name(f"{path.name}.corrupt-{n}{side}").exists() for side in ("", *SIDE_FILES))
