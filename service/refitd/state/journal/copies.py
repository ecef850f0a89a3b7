"""Copies of the journal as it was before a migration: `journal.db.schema-<n>` beside it, for the way back.

One a schema, and those of the newest schemas only. They hold what was asked for by then (pins, rollbacks); what came
later a refitd that goes back to one finds on the disk and at the engines.
"""

import os
import re
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from refitd_client.files.durable import sync_folder
from refitd_client.files.plain_file import open_plain

KEPT = 2
_SCHEMA_COPY = re.compile(r"\.schema-(\d+)")


def copy_of(path: Path, schema: int) -> Path:
    """Where the copy of a journal of `schema` lies."""
    return path.with_name(f"{path.name}.schema-{schema}")


def keep_copy(path: Path, schema: int) -> Path:
    """Copy the journal, durably; an older copy of the same schema gives way when the new one is complete.

    Raises:
        OSError, sqlite3.Error: it cannot be written; nothing of it stays, and an older copy does.
    """
    kept = copy_of(path, schema)
    unfinished = kept.with_name(f"{kept.name}.unfinished")
    unfinished.unlink(missing_ok=True)  # of a start that was killed here
    try:
        _copy(path, unfinished)
        unfinished.rename(kept)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return kept


def make_private(path: Path) -> None:
    """Let the owner alone read and write a journal, which is made if there is none.

    SQLite gives the files that it makes beside a journal the journal's mode. Call it while this process has no
    connection to the journal: closing a descriptor of the file would release SQLite's locks on it.

    Raises:
        OSError: it cannot be made or written.
    """
    for file in (path, *(path.with_name(path.name + side) for side in ("-wal", "-shm"))):
        if file == path or file.exists():
            handle = open_plain(file, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                with suppress(PermissionError):  # another user's, shared by that user's own choice
                    os.fchmod(handle, 0o600)
            finally:
                os.close(handle)


def _copy(path: Path, to: Path) -> None:
    """By SQLite's own means, so that what is still in its log comes along; it syncs what it has written."""
    make_private(to)
    uri = f"{path.absolute().as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True)) as journal, closing(sqlite3.connect(to)) as copy:
        copy.execute("PRAGMA synchronous=FULL")
        journal.backup(copy)


def drop_old_copies(path: Path) -> None:
    """Remove the copies of all but the newest schemas.

    Raises:
        OSError: one cannot be removed.
    """
    found = [file for file in path.parent.iterdir() if file.name.startswith(path.name)]
    schemas = [int(match[1]) for file in found if (match := _SCHEMA_COPY.fullmatch(file.name.removeprefix(path.name)))]
    for schema in sorted(schemas)[:-KEPT]:
        copy_of(path, schema).unlink()
