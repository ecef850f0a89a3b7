"""A root's lock and journal, read without changing them."""

import fcntl
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import sqlalchemy as sa

from refitd.settings import Settings, group_of
from refitd.state.journal import rows
from refitd.state.journal.database import JOURNAL_NAME
from refitd.state.journal.recovery import (
    FORGOTTEN,
    GROUP_NOTE,
    Condition,
    Corrupt,
    Missing,
    Newer,
    Older,
    Sound,
    UnreadableJournal,
    examine_journal,
    last_state_folder,
    reading,
)
from refitd.state.journal.schema import SCHEMA_VERSION, RecordDamagedError
from refitd.state.records import EngineRecord
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.files.plain_file import open_plain
from refitd_doctor.finding import CheckName, Finding, failed, good, warning
from refitd_hosts.group.address import PostgresAddress
from refitd_hosts.options import GroupSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalFacts:
    """The journal's records.

    Attributes:
        path: of its file, or its database's URL.
        condition: whether it can be read.
        is_shared: whether it is a group's, in PostgreSQL.
        last_folder: the state folder that the root names.
        elsewhere: whether another journal lies in `last_folder`.
        versions: all by id, the deleted among them.
        engines: all by id.
    """

    path: str
    condition: Condition
    is_shared: bool = False
    last_folder: Path | None = None
    elsewhere: bool = False
    versions: Mapping[str, VersionRecord] = field(default_factory=dict[str, VersionRecord])
    engines: Mapping[str, EngineRecord] = field(default_factory=dict[str, EngineRecord])


@contextmanager
def still(root: Path) -> Generator[str | None]:
    """Hold the root's lock while the context lasts, if it is free. Yields the process that holds it, else None.

    Raises:
        OSError: the lock cannot be read.
    """
    try:
        handle = open_plain(root / SERVICE_FOLDER / "lock")
    except FileNotFoundError:
        yield None  # no service was ever here
        return
    try:
        yield _holder(handle)
    finally:
        os.close(handle)


def _holder(handle: int) -> str | None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return f"pid {os.pread(handle, 64, 0).decode(errors='replace').strip() or 'unknown'}"
    return None


def read_journal(settings: Settings, root: Path) -> JournalFacts:
    """Read the journal of the service with these settings. The records of a journal that is not sound are not read.

    Raises:
        OSError: the root's own note of where its journal is cannot be read.
    """
    database = group_of(settings, GroupSettings).database
    if database is not None:
        return _of_group(database, root)
    folder = settings.state_folder
    path = folder / JOURNAL_NAME
    before = last_state_folder(root)
    elsewhere = (
        before is not None
        and before != folder.resolve()
        and (str(before).startswith(GROUP_NOTE) or (before / JOURNAL_NAME).exists())
    )
    condition = examine_journal(path, thorough=True)
    facts = JournalFacts(path=str(path), condition=condition, last_folder=before, elsewhere=elsewhere)
    if not isinstance(condition, Sound):
        return facts
    with reading(path) as connection:
        return _with_records(facts, connection)


def _of_group(database: PostgresAddress, root: Path) -> JournalFacts:
    # Here, because its driver is an extra.
    from refitd_hosts.group.journal import examine_group, reading_group

    condition = examine_group(database)
    facts = JournalFacts(path=database.shown, condition=condition, is_shared=True, last_folder=last_state_folder(root))
    if not isinstance(condition, Sound):
        return facts
    try:
        with reading_group(database) as connection:
            return _with_records(facts, connection)
    except RecordDamagedError as error:
        return replace(facts, condition=Corrupt(str(error)))


def _with_records(facts: JournalFacts, connection: sa.Connection) -> JournalFacts:
    return replace(
        facts,
        versions={version.id: version for version in rows.read_versions(connection)},
        engines={each.id: each for each in rows.read_records(connection, EngineRecord) if not each.naming.removed},
    )


def judge_journal(journal: JournalFacts) -> Finding:
    subject, check = str(journal.path), CheckName.JOURNAL
    match journal.condition:
        case Sound(origin=origin) if origin.rebuilt:
            return good(check, subject, "can be read to its end")
        case Sound(origin=origin):
            text = f"it was begun anew, and a service that runs rebuilds it: {origin.cause}; {FORGOTTEN}"
            return warning(check, subject, text, "run the service: until then nothing is collected")
        case Missing() if journal.last_folder is None:
            return good(check, subject, "there is none yet: the service begins it")
        case Missing() if journal.elsewhere:
            text = f"there is none, and the root's last one lies in {journal.last_folder}"
            return warning(check, subject, text, "name that one with --state")
        case Missing():
            text = f"there is none, and a service has run on this root before: the next start begins one; {FORGOTTEN}"
            return warning(check, subject, text, "is --state right? Else start the service")
        case Older(schema=schema):
            text = f"an earlier refitd wrote it: the next start moves it aside and begins one; {FORGOTTEN}"
            return warning(check, subject, text, f"to keep it, go on with that refitd (schema {schema})")
        case Newer(schema=schema):
            text = f"a later refitd wrote it (schema {schema}, and this one knows {SCHEMA_VERSION})"
            fix = "run that refitd"
        case Corrupt(reason=reason):
            text = f"it is corrupt: {reason}"
            fix = (
                "restore the database from its backup; without one give the group an empty database, and delete the "
                f"root's note of this one; {FORGOTTEN}"
                if journal.is_shared
                else "restore it from a backup; or start the service again: it moves it aside and begins one; "
                f"{FORGOTTEN}"
            )
        case UnreadableJournal(reason=reason):
            text, fix = f"it cannot be read: {reason}", f"see who holds {journal.path} and who may read it"
    return failed(check, subject, text, fix)


def judge_group(database: PostgresAddress) -> Finding:
    """Ask the database who leads. Blocks, for seconds where it does not answer."""
    # Here, because the driver is an extra.
    import psycopg

    from refitd_hosts.group.journal import look_at_group

    check, subject = CheckName.JOURNAL, database.shown
    try:
        leader, why = look_at_group(database)
    except psycopg.Error as error:
        text = f"it does not answer: {' '.join(str(error).split())}"
        return failed(check, subject, text, "see to the database, its address and its password")
    if why is not None:
        return failed(check, subject, why, "name another database with --state")
    if leader is None:
        return good(check, subject, "no service has led yet: the first that starts does")
    if leader.released:
        text = f"no service leads: {leader.address} gave the lead back (epoch {leader.epoch})"
        return warning(check, subject, text, "start a service of the group")
    text = f"{leader.address} leads, or led last, since {leader.since} (epoch {leader.epoch})"
    return good(check, subject, text)
