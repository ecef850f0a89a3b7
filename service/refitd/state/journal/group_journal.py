"""Opening the journal of a group: whether the database that `--state` names is the one that its root is about.

The root's `.refitd/journal` holds the group's name, as it holds the state folder of a service alone. Another name, or a
folder with a journal, says that this is the wrong database, or the wrong root; a journal of another database would hide
what the right one knows.
"""

from dataclasses import replace
from pathlib import Path

import psycopg
from sqlalchemy.exc import DatabaseError

from refitd.root.file_systems import mounts_now
from refitd.root.mark import mark_root
from refitd.root.ownership import StartRefusedError
from refitd.root.scan import Listing, scan
from refitd.state.journal.address import GROUP_NOTE, PostgresAddress
from refitd.state.journal.journal import Journal
from refitd.state.journal.leadership import HeldLead
from refitd.state.journal.postgres import DatabaseRefusedError, PostgresDatabase
from refitd.state.journal.recovery import NOTE_NAME, last_state_folder, write_note
from refitd.state.journal.sqlite_file import JOURNAL_NAME
from refitd.state.records import NEW, Origin
from refitd_client.contract.naming import SERVICE_FOLDER


def open_group_journal(database: PostgresAddress, lead: HeldLead, root: Path) -> Journal:
    """Open the journal of a group for the process that leads it, or begin one. Blocks.

    Raises:
        StartRefusedError: it must not or cannot be used; the message says why and what to do.
    """
    note = f"{GROUP_NOTE}{lead.service}"
    try:
        before = last_state_folder(root)
        if before is not None and str(before) != note:
            _refuse_another(root, before, database)
        journal = Journal(PostgresDatabase(database, lead), _origin(root, before, database))
        try:
            write_note(root, note)
        except BaseException:
            journal.close()
            raise
    except DatabaseRefusedError as error:
        raise StartRefusedError(str(error)) from error
    except (OSError, psycopg.Error, DatabaseError) as error:
        why = str(error.orig if isinstance(error, DatabaseError) else error).strip()
        raise StartRefusedError(f"the journal {database.shown} cannot be used: {why}") from error
    return journal


def _refuse_another(root: Path, before: Path, database: PostgresAddress) -> None:
    note = root / SERVICE_FOLDER / NOTE_NAME
    if str(before).startswith(GROUP_NOTE):
        raise StartRefusedError(
            f"the journal of {root} is in another database than {database.shown}: name that one with --state; if it is "
            f"gone for good, delete {note}, and the journal is rebuilt from what is on disk"
        )
    if (before / JOURNAL_NAME).exists():
        raise StartRefusedError(
            f"the journal of {root} is in {before}: start with --state {before}; or move {before / JOURNAL_NAME}* "
            f"away, and that of {database.shown} is rebuilt from what is on disk"
        )


def _origin(root: Path, before: Path | None, database: PostgresAddress) -> Origin:
    """How the journal begins, should there be none in the database. `before` is the root's note."""
    mark = mark_root(root, None, has_versions=False, mounts=mounts_now())
    if before is not None:
        cause = f"{database.shown} had none, and a service has run on {root} before"
        return Origin(cause=cause, lost=True, rebuilt=False, root=mark)
    listing = scan(root)
    if isinstance(listing, Listing) and not listing.found:
        return replace(NEW, root=mark)
    return Origin(cause=f"{database.shown} had none, and {root} has versions already", rebuilt=False, root=mark)
