"""Out of the way with a journal that cannot be used: renamed, never deleted, so that it can still be looked into."""

from itertools import count
from pathlib import Path

from refitd.state.journal.condition import SIDE_FILES
from refitd_client.files.durable import sync_folder


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
