"""What the journal says, read without changing it."""

from pathlib import Path

import sqlalchemy as sa

from refitd.diagnose.fsck.facts import JournalFacts
from refitd.state.journal import reads
from refitd.state.journal.condition import Sound, examine_journal, reading
from refitd.state.journal.journal import JOURNAL_NAME
from refitd.state.journal.whereabouts import last_state_folder


def read_journal(folder: Path, root: Path) -> JournalFacts:
    """Look at the journal in `folder`. One that is not sound tells nothing but that.

    Raises:
        OSError: the root's own note of where its journal is cannot be read.
    """
    path = folder / JOURNAL_NAME
    before = last_state_folder(root)
    elsewhere = before is not None and before != folder.resolve() and (before / JOURNAL_NAME).exists()
    condition = examine_journal(path, thorough=True)
    bare = JournalFacts(path=path, condition=condition, last_folder=before, elsewhere=elsewhere)
    if not isinstance(condition, Sound):
        return bare
    with reading(path) as connection:
        return _full(bare, connection)


def _full(bare: JournalFacts, connection: sa.Connection) -> JournalFacts:
    return JournalFacts(
        path=bare.path,
        condition=bare.condition,
        last_folder=bare.last_folder,
        elsewhere=bare.elsewhere,
        versions={version.id: version for version in reads.read_versions(connection)},
        engines={engine.id: engine for engine in reads.read_engines(connection)},
        open_attempts=reads.read_open_attempts(connection),
        fingerprints={(v, configuration): found for v, configuration, found in reads.read_fingerprints(connection)},
        rollouts=reads.read_rollouts(connection),
    )
