"""Names that are given to folders in one folder by a rename, as the kernel tells them: inotify(7).

watchdog's observer has threads and delays of its own, and is not needed in an engine's process for one kind of event.
"""

import ctypes
import os
from struct import Struct
from threading import Lock

from refitd_client.files.plain_file import open_folder

_MOVED_TO, _ONLY_FOLDERS, _IS_FOLDER = 0x00000080, 0x01000000, 0x40000000  # sys/inotify.h
_EVENT = Struct("iIII")  # watch, what, cookie, length of the name that follows
_EVENTS_ROOM = 64 * (_EVENT.size + 256)


class FolderRenames:
    """One folder at a time is watched. `watch` may be called in any thread, `wait` in one."""

    def __init__(self) -> None:
        """Begin with none.

        Raises:
            OSError: the user has as many instances of inotify as the kernel allows.
        """
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._checked(self._libc.inotify_init1(os.O_CLOEXEC))
        self._watched: tuple[int, int] | None = None  # the watch, and a descriptor of its folder
        self._turn = Lock()

    def watch(self, folder: int) -> None:
        """Watch the folder of this descriptor, and no longer the one of before.

        Raises:
            OSError: the user has as many watches as the kernel allows.
        """
        with self._turn:
            if self._watched is not None and os.path.sameopenfile(self._watched[1], folder):
                return
            path = f"/proc/self/fd/{folder}".encode()
            watch = self._checked(self._libc.inotify_add_watch(self._fd, path, _MOVED_TO | _ONLY_FOLDERS))
            self._forget()
            self._watched = watch, os.dup(folder)

    def wait(self) -> list[tuple[str, int]]:
        """Wait for renames. Returns the names, each with a descriptor of it, which the caller closes.

        A folder that has another name again by now is left out.
        """
        data = os.read(self._fd, _EVENTS_ROOM)
        found: list[tuple[str, int]] = []
        at = 0
        while at < len(data):
            watch, what, _, length = _EVENT.unpack_from(data, at)
            name = data[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0").decode(errors="surrogateescape")
            at += _EVENT.size + length
            if what & _IS_FOLDER and (folder := self._opened(watch, name)) is not None:
                found.append((name, folder))
        return found

    def _opened(self, watch: int, name: str) -> int | None:
        with self._turn:
            if self._watched is None or self._watched[0] != watch:
                return None
            try:
                return open_folder(name, within=self._watched[1])
            except OSError:
                return None

    def _forget(self) -> None:
        if self._watched is not None:
            watch, folder = self._watched
            self._libc.inotify_rm_watch(self._fd, watch)  # fails where the folder is gone, and with it the watch
            os.close(folder)
            self._watched = None

    @staticmethod
    def _checked(result: int) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"inotify: {os.strerror(number)}")
        return result
