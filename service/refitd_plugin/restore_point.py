"""What a rank stands on: the version that it serves, and what that would be put back from.

What came from a trainer's memory can be put back when its files have followed: a thread opens them then, beside
SGLang's own, which commits.
"""

import logging
from pathlib import Path
from threading import Lock

from refitd_plugin.changes import is_delta
from refitd_plugin.following import Following
from refitd_plugin.imported import OfferedMemory, with_files
from refitd_plugin.served import ServedState
from refitd_plugin.source import SourceRefusedError, is_version, mapped, place_of
from refitd_plugin.startup import folder_of, started_from

logger = logging.getLogger("refitd_plugin")


class RestorePoint:
    """One rank's. `revision` is that of the model which the server was started with, on the hub."""

    def __init__(self, root: Path | None, revision: str | None) -> None:
        """Nothing is known of the weights in memory."""
        self.served_state: ServedState | None = None
        self._root, self._revision = root, revision
        self._lock, self._turn = Lock(), Lock()
        self._following = Following(self.fall_back_on_files)

    @property
    def label(self) -> str:
        """The id of the version, as far as it came by way of the plugin."""
        served_state = self.served_state
        return "" if served_state is None else served_state.label

    @property
    def has_no_files(self) -> bool:
        """Whether it is a version from memory, whose files were not there at the last look."""
        return self.served_state is not None and isinstance(self.served_state.source, OfferedMemory)

    def at(self, path: str) -> ServedState | None:
        """What is served, where it came from this path and could not come from there again: a delta, or an offer."""
        served_state = self.served_state
        if served_state is None or str(served_state.folder) != str(Path(path).absolute()):
            return None
        return served_state if served_state.deltas or self.has_no_files else None

    def record(self, served_state: ServedState | None) -> None:
        """This is served from now on; None where nobody knows what is."""
        with self._lock:  # against a thread that has just opened the files of what was there before
            self.served_state = served_state
        if served_state is not None and isinstance(served_state.source, OfferedMemory):
            self._following.begin()

    def fall_back_on_files(self) -> bool:
        """What came from memory is put back from its files, from now on, where they have come. Whether that is so, or
        there is nothing to put back.

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
        if is_version(path):
            return ServedState(source=mapped(place_of(path, self._root)))
        return ServedState(source=started_from(folder_of(path, self._revision)))
