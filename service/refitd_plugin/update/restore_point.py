"""The version that a rank serves, and what it would be put back from.

What came from a trainer's memory can be put back when its files have followed. A thread beside the engine's own opens
them as soon as they are there. To open them when the next version is prepared would have its trainer wait: a look at a
folder is some hundred steps, each of which waits for SGLang's loop.

One that gets no files cannot be put back. If the next update fails after its first write, the contents are unknown, and
the service loads a version that has files.
"""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock

from refitd_plugin.channel import short_turns
from refitd_plugin.delta.changes import is_delta
from refitd_plugin.memory.offered import OfferedMemory, with_files
from refitd_plugin.memory.source import SourceRefusedError, folder_of, is_version, mapped, place_of, started_from
from refitd_plugin.update.update_source import ServedState

_RESTORE_LOOK_SECONDS = 0.1
_LESS_OFTEN = 2.0  # where opening them failed: it says why in the log, and the next prepare says it to the service
logger = logging.getLogger("refitd_plugin")


class FileFollower:
    """Calls `look` in a thread, again and again, until it returns True: there is nothing to wait for any more."""

    def __init__(self, look: Callable[[], bool]) -> None:
        self._look = look
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Begin to look for files: a version was taken from memory."""
        self._wanted.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="refitd-following", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            while True:
                try:
                    with short_turns():
                        if self._look():
                            break
                except Exception as error:  # the thread goes on: the next versions need it
                    logger.warning("the files of what is served cannot be opened yet: %s", error)
                    time.sleep(_LESS_OFTEN)
                time.sleep(_RESTORE_LOOK_SECONDS)


class RestorePoint:
    """What one rank serves. `revision` is that of the model which the server was started with, on the hub."""

    def __init__(self, root: Path | None, revision: str | None) -> None:
        self.served_state: ServedState | None = None
        self._root, self._revision = root, revision
        self._lock, self._turn = Lock(), Lock()
        self._following = FileFollower(self.fall_back_on_files)

    @property
    def label(self) -> str:
        """The id of the version; empty where the plugin did not load it."""
        served_state = self.served_state
        return "" if served_state is None else served_state.label

    @property
    def has_no_files(self) -> bool:
        """Whether it is a version from memory, whose files were not there at the last look."""
        return self.served_state is not None and isinstance(self.served_state.source, OfferedMemory)

    @property
    def awaits_files(self) -> bool:
        """Whether files of what is served are to follow, and were not there at the last look."""
        source = None if self.served_state is None else self.served_state.source
        return isinstance(source, OfferedMemory) and source.announced.files

    def at(self, path: str) -> ServedState | None:
        """What is served, where it came from this path and could not come from there again: a delta, or an offer."""
        served_state = self.served_state
        if served_state is None or str(served_state.folder) != str(Path(path).absolute()):
            return None
        return served_state if served_state.deltas or self.has_no_files else None

    def record(self, served_state: ServedState | None) -> None:
        """Record what is served from now on; None where that is not known."""
        with self._lock:  # against a thread that has just opened the files of what was there before
            self.served_state = served_state
        if served_state is not None and isinstance(served_state.source, OfferedMemory):
            self._following.begin()

    def fall_back_on_files(self) -> bool:
        """Use the files of a version that came from memory, where they have come.

        Returns:
            Whether there is nothing to wait for: they have come, or what is served did not come from memory.

        Raises:
            SourceRefusedError, OSError: they are there, and cannot be opened.
        """
        with self._turn:
            served_state = self.served_state
            if served_state is None or not isinstance(served_state.source, OfferedMemory):
                return True
            if (found := with_files(served_state)) is None:
                return False
            with self._lock:
                if self.served_state is served_state:
                    self.served_state = found
            return True

    def previous(self, path: str) -> ServedState | None:
        """What is served now from `path`, opened before anything is written, so that it can be put back."""
        try:
            return self._opened(path)
        except (SourceRefusedError, OSError) as error:
            logger.warning("what is served now could not be put back if the update failed: %s", error)
            return None

    def _opened(self, path: str) -> ServedState | None:
        self.fall_back_on_files()
        if self.served_state is not None and str(self.served_state.folder) == str(Path(path).absolute()):
            return None if self.has_no_files else self.served_state
        if is_delta(path):
            logger.warning("what is served now could not be put back if the update failed: it is an unknown delta")
            return None
        if is_version(path, self._root):
            return ServedState(source=mapped(place_of(path, self._root)))
        return ServedState(source=started_from(folder_of(path, self._revision)))
