"""Where the journal may live: on a local disk, unless the operator says otherwise by naming the folder."""

from pathlib import Path

from refitd.root.file_systems import file_system_of, wants_polling
from refitd.root.ownership import StartRefusedError

VOLATILE = frozenset({"tmpfs", "ramfs"})


def check_state_folder(folder: Path, *, named: bool, mounts: str) -> None:
    """Check that a journal in `folder` would be there after a reboot. `mounts` is the text of /proc/self/mounts.

    Raises:
        StartRefusedError: it is on a tmpfs or network file system and was not named by the operator.
    """
    kind = file_system_of(folder.resolve(), mounts)
    if named or kind == "overlay":  # a container's own file system: there is no better place to choose by default
        return
    if kind in VOLATILE:
        raise StartRefusedError(
            f"the state folder {folder} is on {kind} and gone after a reboot: name one with --state"
        )
    if wants_polling(kind):
        raise StartRefusedError(
            f"the state folder {folder} is on {kind}, where SQLite is unsafe: name one with --state"
        )
