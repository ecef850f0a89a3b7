"""A root's lock and journal, read without changing them."""

import fcntl
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from refitd.state.journal import reads
from refitd.state.journal.condition import Condition, Sound, examine_journal, reading
from refitd.state.journal.journal import JOURNAL_NAME
from refitd.state.journal.recovery import last_state_folder
from refitd.state.records import AttemptRecord, EngineRecord, RolloutRecord
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.files.plain_file import open_plain


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalFacts:
    """The journal's records.

    Attributes:
        path: of its file.
        condition: whether it can be read.
        last_folder: the state folder that the root names.
        elsewhere: whether another journal lies in `last_folder`.
        versions: all by id, the deleted among them.
        engines: all by id.
        open_attempts: loads that began and did not end.
        fingerprints: by version and configuration, what a clean load gave.
        rollouts: all.
    """

    path: Path
    condition: Condition
    last_folder: Path | None = None
    elsewhere: bool = False
    versions: Mapping[str, VersionRecord] = field(default_factory=dict[str, VersionRecord])
    engines: Mapping[str, EngineRecord] = field(default_factory=dict[str, EngineRecord])
    open_attempts: Sequence[AttemptRecord] = ()
    fingerprints: Mapping[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    rollouts: Sequence[RolloutRecord] = ()

    @property
    def is_complete(self) -> bool:
        """Whether it knows which engine reads what. By a journal that does not, nothing is deleted."""
        return isinstance(self.condition, Sound) and self.condition.origin.rebuilt


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


def read_journal(folder: Path, root: Path) -> JournalFacts:
    """Read the journal in `folder`. Of one that is not sound only that is known.

    Raises:
        OSError: the root's own note of where its journal is cannot be read.
    """
    path = folder / JOURNAL_NAME
    before = last_state_folder(root)
    elsewhere = before is not None and before != folder.resolve() and (before / JOURNAL_NAME).exists()
    condition = examine_journal(path, thorough=True)
    facts = JournalFacts(path=path, condition=condition, last_folder=before, elsewhere=elsewhere)
    if not isinstance(condition, Sound):
        return facts
    with reading(path) as connection:
        return replace(
            facts,
            versions={version.id: version for version in reads.read_versions(connection)},
            engines={engine.id: engine for engine in reads.read_engines(connection)},
            open_attempts=reads.read_open_attempts(connection),
            fingerprints={(v, configuration): found for v, configuration, found in reads.read_fingerprints(connection)},
            rollouts=reads.read_rollouts(connection),
        )
