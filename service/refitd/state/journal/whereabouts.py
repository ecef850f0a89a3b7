"""Where the journal of a root is, as the root itself says it: `.refitd/journal` holds the path of the state folder.

A journal that is not where it is looked for was lost, or is looked for in the wrong place, which an empty one would
hide. And where this file is, a service has run on the root before.
"""

import os
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.files.durable import replace_file
from refitd_client.files.plain_file import read_plain

_NAME = "journal"
_LONGEST = 4096  # bytes of a path, PATH_MAX


def last_state_folder(root: Path) -> Path | None:
    """The state folder of the service that ran on `root` last; None where none has.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        return Path(os.fsdecode(read_plain(root / SERVICE_FOLDER / _NAME, _LONGEST)).strip())
    except FileNotFoundError:
        return None


def note_state_folder(root: Path, folder: Path) -> None:
    """Write it down, durably.

    Raises:
        OSError: it cannot be written.
    """
    folder = folder.resolve()
    with suppress(OSError):
        if last_state_folder(root) == folder:
            return
    own = root / SERVICE_FOLDER
    replace_file(own / _NAME, os.fsencode(f"{folder}\n"), by=own / f"journal-{uuid4().hex}")
