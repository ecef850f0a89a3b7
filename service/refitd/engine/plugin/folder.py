"""Which sockets there are in `<root>/.refitd/engines`. Blocks: callers on the event loop go through a thread.

Processes that were killed leave theirs behind, and anyone who may write there may put a link, a FIFO or a file in
their place: what is no socket, or is not called as the plugin calls them, is passed over.
"""

import os
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from refitd.engine.plugin.trust import FolderAccess
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.contract.plugin import ENGINES_FOLDER, is_socket_name
from refitd_client.files.plain_file import open_folder

MOST_SOCKETS = 512  # the newest: the others are leftovers


@dataclass(frozen=True, slots=True)
class Listing:
    """The folder as it is now. `descriptor` is open as long as the context that gave the listing."""

    descriptor: int
    access: FolderAccess
    names: tuple[str, ...]


@contextmanager
def listing(root: Path) -> Generator[Listing]:
    """Open the folder beneath a root and list its sockets, the newest first. Links are not followed.

    Raises:
        OSError: there is none (FileNotFoundError), a part of it is a link, or it cannot be listed.
    """
    descriptor = _open(root)
    try:
        status = os.fstat(descriptor)
        access = FolderAccess(status.st_uid, status.st_gid, status.st_mode)
        yield Listing(descriptor, access, _sockets(descriptor))
    finally:
        os.close(descriptor)


def _open(root: Path) -> int:
    descriptor = open_folder(root, follow=True)
    for part in (SERVICE_FOLDER, ENGINES_FOLDER):
        above = descriptor
        try:
            descriptor = open_folder(part, within=above)
        finally:
            os.close(above)
    return descriptor


def _sockets(descriptor: int) -> tuple[str, ...]:
    found: dict[str, int] = {}
    for name in os.listdir(descriptor):
        if is_socket_name(name):
            with suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                if stat.S_ISSOCK(status.st_mode):
                    found[name] = status.st_mtime_ns
    return tuple(sorted(found, key=lambda name: (-found[name], name))[:MOST_SOCKETS])
