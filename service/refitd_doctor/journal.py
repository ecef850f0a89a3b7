"""A root's lock and journal, read without changing them."""

import fcntl
import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import sqlalchemy as sa

from refitd.policy.goals import last_good
from refitd.settings import Settings
from refitd.state.journal import rows
from refitd.state.journal.address import GROUP_NOTE, PostgresAddress
from refitd.state.journal.database import JOURNAL_NAME
from refitd.state.journal.recovery import Condition, Corrupt, Sound, examine_journal, last_state_folder, reading
from refitd.state.journal.schema import RecordDamagedError
from refitd.state.records import EngineRecord
from refitd.state.version import VersionRecord
from refitd.text import size_of
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.files.plain_file import open_plain
from refitd_doctor.finding import CheckName, Finding, good, warning


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalFacts:
    """The journal's records.

    Attributes:
        path: of its file, or its database's URL.
        is_shared: whether it is a group's, in PostgreSQL.
        condition: whether it can be read.
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
    """Read the journal of the service with these settings. Of one that is not sound only that is known.

    Raises:
        OSError: the root's own note of where its journal is cannot be read.
    """
    if settings.database is not None:
        return _of_group(settings.database, root)
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
    from refitd.state.journal.postgres import examine_group, reading_group

    condition = examine_group(database)
    before = last_state_folder(root)
    facts = JournalFacts(path=database.shown, condition=condition, is_shared=True, last_folder=before)
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
        engines={engine.id: engine for engine in rows.read_engines(connection)},
    )


_FIX = "publish a version with files: any transport with durable='always', or transport='disk'"


_PUSHED = "where the store is to have each version, publish with durable='always'"


def judge_durability(journal: JournalFacts, push: str | None = None) -> Iterator[Finding]:
    """Say of each run whose engines serve a version without files where they, or a rollback, would go back to.

    Args:
        push: the object store that it pushes to, None where it pushes to none.
    """
    serving = [engine.serving for engine in journal.engines.values() if engine.known]
    held = [version for version in journal.versions.values() if version.in_memory and version.id in serving]
    for run in sorted({version.run for version in held}):
        newest = max((version for version in held if version.run == run), key=lambda version: version.order)
        good_one = last_good(version for version in journal.versions.values() if version.run == run)
        count = serving.count(newest.id)
        text = (
            f"{count} engine{'s serve' if count > 1 else ' serves'} {newest.id} from memory alone "
            f"({newest.files_to_come if newest.state.is_open else newest.reason}): {_leads(newest, good_one)}"
        )
        is_chosen = newest.durability is not None and newest.state.is_open and good_one is not None
        yield good(CheckName.VERSIONS, run, text) if is_chosen else warning(CheckName.VERSIONS, run, text, _FIX)
        if push is not None:
            has = "no version of the run" if good_one is None else f"{good_one.id} at most"
            text = f"{newest.id} has no files, and only versions with files are pushed: {push} gets {has}"
            yield warning(CheckName.VERSIONS, run, text, _PUSHED)


def _leads(newest: VersionRecord, good_one: VersionRecord | None) -> str:
    if good_one is None:
        return "no version of the run has good files, so one that restarts stays on its start-up weights"
    size = "" if good_one.files.bytes is None else f", and loads {size_of(good_one.files.bytes)}"
    if good_one.order.generation != newest.order.generation:
        return f"one that restarts goes back to {good_one.id}, of an earlier generation{size}"
    steps = newest.order.step - good_one.order.step
    return f"one that restarts goes back to {good_one.id}, by {steps} step{'s' * (steps != 1)}{size}"
