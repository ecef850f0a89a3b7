"""What `--repair` does. A service that starts mends all else by itself.

a damaged journal        what a start does with one, by the same function; and so with one of which only the log is
                         damaged, with which a service runs. Wants the locks that a service holds
a root that was emptied  gets the name that the journal knows, at this word alone: a file system that is not
                         mounted looks the same
"""

from collections.abc import Iterator
from pathlib import Path

from refitd.diagnose.doctor.finding import CheckName, Finding, failed, good
from refitd.diagnose.doctor.root import stranger
from refitd.diagnose.journal import JournalFacts
from refitd.root.file_systems import mounts_now
from refitd.root.mark import RootRefusedError, adopt
from refitd.root.ownership import StartRefusedError, owned, state_owned
from refitd.settings import Settings
from refitd.state.journal.condition import Corrupt
from refitd.state.journal.recovery import open_journal

_REPAIR_AGAIN = "do so, and run --repair again"


def mend(settings: Settings, root: Path, journal: JournalFacts) -> Iterator[Finding]:
    """Mend journal and root; say what was done to the root, and why something could not be done. Blocks."""
    if isinstance(journal.condition, Corrupt) and not journal.is_shared:
        try:
            with owned(root), state_owned(settings.state_folder):
                open_journal(settings.state_folder, root, thorough=True).close()
        except StartRefusedError as error:
            yield failed(CheckName.JOURNAL, str(journal.path), f"not repaired: {error}", _REPAIR_AGAIN)
    try:
        if (mark := stranger(root, journal)) is not None:
            adopt(root, mark, mounts=mounts_now())
            yield good(CheckName.ROOT, str(root), "is the root of this journal from now on")
    except (OSError, RootRefusedError) as error:
        yield failed(CheckName.ROOT, str(root), f"not repaired: {error}", _REPAIR_AGAIN)
