"""What a rank stands on: the version that it serves, and what that would be put back from.

What came from a trainer's memory can be put back when its files have followed: a thread opens them then, beside
SGLang's own, which commits.
"""

import logging
from pathlib import Path
from threading import Lock
from typing import Any

from refitd_sglang.changes import is_delta
from refitd_sglang.following import Following
from refitd_sglang.lent import Memory, with_files
from refitd_sglang.source import SourceRefusedError, is_version, mapped, place_of
from refitd_sglang.standing import Standing
from refitd_sglang.startup import folder_of, started_from

logger = logging.getLogger("refitd_sglang")


class Footing:
    """One rank's. `config` is SGLang's of its model."""

    def __init__(self, root: Path | None, config: Any) -> None:
        """Nothing is known of the weights in memory."""
        self.standing: Standing | None = None
        self._root, self._config = root, config
        self._lock, self._turn = Lock(), Lock()
        self._following = Following(self.fall_back_on_files)

    @property
    def label(self) -> str:
        """The id of the version, as far as it came by way of the plugin."""
        standing = self.standing
        return "" if standing is None else standing.label

    @property
    def has_no_files(self) -> bool:
        """Whether it is a version from memory, whose files were not there at the last look."""
        return self.standing is not None and isinstance(self.standing.source, Memory)

    def at(self, path: str) -> Standing | None:
        """What is served, where it came from this path and could not come from there again: a delta, or an offer."""
        standing = self.standing
        if standing is None or str(standing.folder) != str(Path(path).absolute()):
            return None
        return standing if standing.deltas or self.has_no_files else None

    def stand_on(self, standing: Standing | None) -> None:
        """This is served from now on; None where nobody knows what is."""
        with self._lock:  # against a thread that has just opened the files of what was there before
            self.standing = standing
        if standing is not None and isinstance(standing.source, Memory):
            self._following.begin()

    def fall_back_on_files(self) -> bool:
        """What came from memory is put back from its files, from now on, where they have come. Whether that is so, or
        there is nothing to put back.

        Raises:
            SourceRefusedError, OSError: they are there, and cannot be opened.
        """
        with self._turn:
            standing = self.standing
            if standing is None or not isinstance(standing.source, Memory):
                return True
            if (found := with_files(standing)) is None:
                return False
            with self._lock:
                if self.standing is standing:
                    self.standing = found
            return True

    def previous(self, path: str) -> Standing | None:
        """What is served now from `path`, opened before anything is written, so that it can be put back."""
        try:
            return self._opened(path)
        except (SourceRefusedError, OSError) as error:
            logger.warning("what is served now could not be put back if the update failed: %s", error)
            return None

    def _opened(self, path: str) -> Standing | None:
        self.fall_back_on_files()
        if self.standing is not None and str(self.standing.folder) == str(Path(path).absolute()):
            return None if self.has_no_files else self.standing
        if is_delta(path):
            logger.warning("what is served now could not be put back if the update failed: it is an unknown delta")
            return None
        if is_version(path):
            return Standing(source=mapped(place_of(path, self._root)))
        return Standing(source=started_from(folder_of(path, self._config)))
