"""Opening the journal at start: what happens when it is missing, corrupt, newer than this refitd, or cannot be read.

    sound       it is opened; one of an older refitd is brought to this one's schema first, and a copy kept
    missing     on a new root a journal begins; on one that was in use an empty one begins, to be rebuilt
    corrupt     it is moved aside, never deleted, and an empty one begins, to be rebuilt
    newer       refused: what this refitd does not understand it must not change
    unreadable  refused: a lock, a right or a failing disk says nothing about what is in it

To be rebuilt means: versions come back by the scan and are validated again, engines by the probe. Only the journal knew
what an engine holds, so its contents count as unknown until a full load is proved. What operators asked for (pins,
rollbacks) is gone. Nothing is collected until the root was listed and each engine asked.

The root says where its journal is: `.refitd/journal` holds the path of the state folder. A journal that is not where it
is looked for was lost, or is looked for in the wrong place; an empty one would hide that. And where this file is, a
service has run on the root before.
"""

import os
import sqlite3
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import assert_never
from uuid import uuid4

import structlog
from sqlalchemy.exc import DatabaseError

from refitd.root.file_systems import mounts_now
from refitd.root.mark import mark_root
from refitd.root.ownership import StartRefusedError
from refitd.root.scan import Listing, scan
from refitd.state.journal.address import GROUP_NOTE
from refitd.state.journal.condition import (
    SIDE_FILES,
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
from refitd.state.journal.schema import SCHEMA_VERSION
from refitd.state.journal.sqlite_file import JOURNAL_NAME
from refitd.state.records import NEW, Origin
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.files.durable import replace_file, sync_folder
from refitd_client.files.plain_file import read_plain

FORGOTTEN = (
    "versions are validated again and every engine is loaded again; pins and rollbacks that the journal knew are gone "
    "(ask for them again), and so are engines that were added by hand and versions that were announced with a path of "
    "their own; nothing is collected until the root was listed and every engine asked"
)

log = structlog.get_logger("refitd")

NOTE_NAME = "journal"

_LONGEST = 4096  # bytes of a path, PATH_MAX


def open_journal(folder: Path, root: Path) -> Journal:
    """Open the journal in `folder` for the service of `root`, or begin one. Blocks.

    Raises:
        StartRefusedError: it must not or cannot be used; the message says why and what to do.
    """
    path = folder / JOURNAL_NAME
    try:
        origin = _origin(path, root)
        if origin.lost:
            log.error("the journal was lost and is rebuilt", reason=origin.cause, consequence=FORGOTTEN)
        journal = Journal(folder, origin)
        note_state_folder(root, folder)
    except (OSError, sqlite3.Error, DatabaseError) as error:
        why = error.orig if isinstance(error, DatabaseError) else error
        raise StartRefusedError(
            f"the journal {path} cannot be used: {why}; the service needs to write it and its folder"
        ) from error
    return journal


def _origin(path: Path, root: Path) -> Origin:
    """What is written into a journal at `path` that begins now, about the root as it is."""
    before = last_state_folder(root)
    if before is not None and str(before).startswith(GROUP_NOTE):
        raise StartRefusedError(
            f"the journal of {root} is in the database of a group: start with --state postgresql://…; if that is gone "
            f"for good, delete {root / SERVICE_FOLDER / NOTE_NAME}, and the journal is rebuilt from what is on disk"
        )
    origin = _began(path, root)
    if path.exists():
        return origin  # it knows its root, which may be away now
    return replace(origin, root=mark_root(root, None, has_versions=False, mounts=mounts_now()))


def _began(path: Path, root: Path) -> Origin:
    """How a journal at `path` begins, should there be none when this returns."""
    condition = examine_journal(path, thorough=False)
    match condition:
        case Sound(schema=schema):
            _bring_up(path, schema)
            return NEW  # it has one
        case Missing(leftovers):
            origin = _of_missing(path, root)
            if leftovers:
                move_aside(path)
            return origin
        case Corrupt(reason):
            aside = move_aside(path)
            return Origin(cause=f"{path} was corrupt ({reason}); it lies in {aside} now", lost=True, rebuilt=False)
        case Newer(schema):
            raise StartRefusedError(_too_new(path, schema))
        case UnreadableJournal(reason):
            raise StartRefusedError(f"the journal {path} cannot be read: {reason}; it is left as it is")
        case _:
            assert_never(condition)


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
        return Path(os.fsdecode(read_plain(root / SERVICE_FOLDER / NOTE_NAME, _LONGEST)).strip())
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
    names = [path.name, *(path.name + side for side in SIDE_FILES)]
    aside = next(path.with_name(f"{path.name}.corrupt-{n}") for n in count(1) if _is_free(path, n))
    for name in names:
        source = path.with_name(name)
        if source.exists():
            source.rename(aside.with_name(aside.name + name.removeprefix(path.name)))
    sync_folder(path.parent)
    return aside


def _is_free(path: Path, n: int) -> bool:
    return not any(path.with_name(f"{path.name}.corrupt-{n}{side}").exists() for side in ("", *SIDE_FILES))
