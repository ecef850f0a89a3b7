"""A rank that follows a trainer while it writes a version, so that only the rest remains when the version has come.

    the trainer   renames a slot to `.incoming-…`, writes its shards, and says how far it is (`write/progress.py`)
    a thread      hears of the rename, and goes behind the trainer: it copies to the GPU (`copy_ahead.py`), or has the
                  GPU read (`read_ahead.py`)
    prepare       does what is missing (`proving.py`)

Nothing is believed of what is done here. It is of use where prepare finds these very files in a version, and counts
where each tensor has the fingerprint of that version's manifest; else everything is read once more. So a trainer that
dies, writes a block twice or is wrong about how far it is costs a look, and an engine that dies nothing.

Only files that are registered with the GPU already, as those of a slot are once a version in it was loaded: registering
takes longer than it would save.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import NamedTuple, Protocol

from refitd_client.checkpoint.opening import Folder, OpeningRefusedError, listing_of
from refitd_client.checkpoint.strict_header import TensorSpec
from refitd_client.contract.naming import INCOMING_PREFIX
from refitd_client.files.plain_file import plain_file
from refitd_client.write.progress import open_progress, read_progress
from refitd_plugin.folder_renames import FolderRenames
from refitd_plugin.registered import Registered
from refitd_plugin.source import VersionPlace
from refitd_plugin.turns import short_turns

logger = logging.getLogger("refitd_plugin")

_TRAINER_LOOK_SECONDS = 0.002  # a bus of 55 GB/s brings 110 MB in that time
_FIRST_WORD_SECONDS = 0.5  # from the rename until the trainer says how far it is
_SILENT_SECONDS = 10.0  # a trainer that says nothing new for so long has died


class FileLayout(NamedTuple):
    """One file of a version: its size in bytes, the byte in it where its tensors begin, and those that count, in their
    order.
    """

    size: int
    begin: int
    tensors: Mapping[str, TensorSpec]


Layout = Mapping[str, FileLayout]


Files = Mapping[str, Registered]


class Ahead(Protocol):
    """What is done with the files of a version, as far as its trainer has written them."""

    def is_of(self, files: Files, layout: Layout) -> bool:
        """Whether it is done with these very files."""
        ...

    def advance(self, name: str, end: int) -> None:
        """Begin it with a file up to byte `end`, which may be less than before, or more than there is."""
        ...

    def finish(self) -> None:
        """Begin what is missing."""
        ...

    def drop(self) -> None:
        """Give back what it takes: it is not wanted any more."""
        ...

    @property
    def begun(self) -> int:
        """The bytes that it was begun with."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether it was begun with all of them."""
        ...


class TrainerFollower:
    """Follows the trainer of the run whose version was read last."""

    def __init__(
        self,
        known: Callable[[int], Registered | None],
        start: Callable[[Files, Layout], Ahead | None],
        device: Callable[[], AbstractContextManager[object]],
        wants_files: Callable[[], bool],
        is_updated: Callable[[], bool] = lambda: False,
    ) -> None:
        """Begin with no run.

        Args:
            known: gives an open file as it is registered, None where it is not.
            start: makes what is to be done with files; None for nothing.
            device: a context in which that may be done, in any thread.
            wants_files: whether the rank would load a version that is written now, and has it from nowhere else.
            is_updated: whether the rank is loading a version, which is to have the bus for itself.
        """
        self._wants_files, self._is_updated = wants_files, is_updated
        self._known, self._start, self._device = known, start, device
        self._renames: FolderRenames | None = None
        self._is_refused = False
        self._layout: Layout = {}
        self._ahead: Ahead | None = None
        self._lock = threading.Lock()

    def finished(self, place: VersionPlace, files: Files, layout: Layout) -> tuple[Ahead | None, int]:
        """Have it done with all of a version's files, and follow the next version of its run.

        Args:
            place: the version's folder.
            files: its files.
            layout: of the files.

        Returns:
            What was begun with all of them, None where there is nothing; and the bytes that it had begun with before.
        """
        with self._lock:
            ahead = self._ahead
            if ahead is None or not ahead.is_of(files, layout):
                self._drop()  # of a version that did not come
                ahead = self._start(files, layout)
            self._ahead, before = None, 0
            if ahead is not None:
                before = ahead.begun
                ahead.finish()
        self._expect(place, layout)
        return ahead, before

    def _expect(self, place: VersionPlace, layout: Layout) -> None:
        """Follow the next version of the run that has a version at `place`, if its files are laid out in this way."""
        above, _, _ = place.path.rpartition("/")
        if self._is_refused or not above:
            return
        self._layout = layout
        with suppress(FileNotFoundError, OpeningRefusedError), Folder(place.root, above) as folder:
            try:
                self._watch(folder.descriptor)
            except OSError as error:
                self._is_refused = True
                logger.warning("refitd follows no version while it is written: %s", error.strerror)  # it holds frames

    def _watch(self, folder: int) -> None:
        if self._renames is None:
            self._renames = FolderRenames()
            run = partial(self._run, self._renames)
            threading.Thread(target=run, name="refitd-follow", daemon=True).start()
        self._renames.watch(folder)

    def _drop(self) -> None:
        if self._ahead is not None:
            self._ahead.drop()
            self._ahead = None

    def _run(self, renames: FolderRenames) -> None:
        while True:
            for name, folder in renames.wait():
                try:
                    if name.startswith(INCOMING_PREFIX):
                        self.follow(folder)
                except Exception:  # it is looked at once more when it has come
                    logger.warning("refitd could not follow a version while it was written", exc_info=True)
                finally:
                    os.close(folder)

    def follow(self, folder: int) -> None:
        """Follow what is written in an open folder until all is begun with, it was finished, the folder is removed, or
        the trainer falls silent.

        Raises:
            OSError: it cannot be read. CudaDriverError: the driver refused.
        """
        if not self._wants_files():
            return
        with short_turns():
            progress = _begun_progress(folder)
            if progress is None:
                return
            try:
                with self._device():  # memory, too, is asked for along the stream that writes it
                    ahead = self._started(folder)
                    if ahead is not None:
                        self._follow(ahead, folder, progress)
            finally:
                os.close(progress)

    def _started(self, folder: int) -> Ahead | None:
        layout = self._layout
        files = self._files_in(folder, layout)
        if files is None:
            return None
        with self._lock:
            self._drop()  # of a version that did not come
            self._ahead = self._start(files, layout)
            return self._ahead

    def _files_in(self, folder: int, layout: Layout) -> dict[str, Registered] | None:
        """The files that are written, registered; None where they are others than is expected, or not known."""
        sizes = {name: file.size for name, file in listing_of(folder).items()}
        if sizes != {name: file.size for name, file in layout.items()}:
            return None
        files: dict[str, Registered] = {}
        for name in layout:
            with plain_file(name, within=folder) as fd:
                if (file := self._known(fd)) is None:
                    return None
                files[name] = file
        return files

    def _follow(self, ahead: Ahead, folder: int, progress: int) -> None:
        names, heard, said = sorted(self._layout), time.monotonic(), ()
        while not ahead.is_whole:
            reached = read_progress(progress, len(names))
            now = time.monotonic()
            if reached != said:
                heard, said = now, reached
            with self._lock:
                if self._ahead is not ahead:
                    return
                if os.fstat(folder).st_nlink == 0 or now - heard > _SILENT_SECONDS:  # given up, or its trainer has died
                    self._drop()
                    return
                for name, end in zip(names, reached, strict=True) if not self._is_updated() else ():
                    ahead.advance(name, end)
            time.sleep(_TRAINER_LOOK_SECONDS)


def _begun_progress(folder: int) -> int | None:
    """The open file that says how far the trainer is; None where there is none, as of tensors in host memory."""
    given_up = time.monotonic() + _FIRST_WORD_SECONDS
    while time.monotonic() < given_up:
        with suppress(FileNotFoundError):
            return open_progress(folder)
        time.sleep(_TRAINER_LOOK_SECONDS)
    return None
