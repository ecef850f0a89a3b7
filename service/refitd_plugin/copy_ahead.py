"""Copies of a version to the GPU while its trainer still writes it, so that the rest and the proof remain afterwards.

    the trainer   renames a slot to `.incoming-…`, writes its shards, and says how far it is (`write/progress.py`)
    a thread      hears of the rename, and copies behind the trainer into the staging buffer
    prepare       copies what is missing, and has the GPU read all of it in the buffer (`proving.py`)

Nothing is believed of what is copied here. It is of use where prepare finds these very files in a version, and counts
where each tensor in the buffer has the fingerprint of that version's manifest; else everything is copied once more. So
a trainer that dies, writes a block twice or is wrong about how far it is costs a copy, and an engine that dies nothing.

Only files that are registered with the GPU already, as those of a slot are once a version in it was loaded: registering
takes longer than it would save.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial

from refitd_client.checkpoint.opening import Folder, OpeningRefusedError, listing_of
from refitd_client.contract.naming import INCOMING_PREFIX
from refitd_client.files.plain_file import plain_file
from refitd_client.write.progress import open_progress, read_progress
from refitd_plugin.folder_renames import FolderRenames
from refitd_plugin.moves import MemoryMove
from refitd_plugin.registered import Registered
from refitd_plugin.source import VersionPlace
from refitd_plugin.staging import FileOnDevice
from refitd_plugin.turns import short_turns

logger = logging.getLogger("refitd_plugin")

_LOOK_SECONDS = 0.002  # a bus of 55 GB/s brings 110 MB in that time
_BEGIN_SECONDS = 0.5  # from the rename until the trainer says how far it is
_SILENT_SECONDS = 10.0  # a trainer that says nothing new for so long has died

Layout = Mapping[str, tuple[int, int]]
"""The files of a version: the size of each in bytes, and the byte in it where its tensors begin."""

Take = Callable[[Layout], dict[str, FileOnDevice] | None]


@dataclass(slots=True, kw_only=True)
class BufferCopy:
    """The copy of a version's files to `places` in the buffer, as far as it was begun; `begin_move` begins a part of
    it: a move, and the address that its source is counted from.
    """

    files: Mapping[str, Registered]
    layout: Layout
    places: dict[str, FileOnDevice]
    begin_move: Callable[[MemoryMove, int], None]
    _begun: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self._begun = dict.fromkeys(self.layout, 0)

    def is_of(self, files: Mapping[str, Registered], layout: Layout) -> bool:
        """Whether it is the copy of these very files."""
        return self.layout == layout and all(self.files[name] is files[name] for name in layout)

    def advance(self, name: str, end: int) -> None:
        """Begin to copy a file up to byte `end`, which may be less than before, or more than there is."""
        begin, end = self._begun[name], min(end, self.layout[name][0])
        if end > begin:
            self.begin_move(MemoryMove(self.places[name].address + begin, begin, end - begin), self.files[name].address)
            self._begun[name] = end

    def finish(self) -> None:
        """Begin to copy what is missing."""
        for name, (size, _) in self.layout.items():
            self.advance(name, size)

    def taken(self) -> dict[str, FileOnDevice]:
        """The places, which this copy, and who still has it, keeps no longer."""
        places, self.places = self.places, {}
        return places

    @property
    def begun(self) -> int:
        """The bytes that were begun."""
        return sum(self._begun.values())

    @property
    def is_whole(self) -> bool:
        """Whether all was begun."""
        return all(self._begun[name] >= size for name, (size, _) in self.layout.items())


class CopyAhead:
    """Follows the trainer of the run whose version was copied last."""

    def __init__(
        self,
        known: Callable[[int], Registered | None],
        take: Take,
        begin_move: Callable[[MemoryMove, int], None],
        device: Callable[[], AbstractContextManager[object]],
        wants_files: Callable[[], bool],
    ) -> None:
        """Begin with no run.

        Args:
            known: gives an open file as it is registered, None where it is not.
            take: gives room in the staging buffer.
            begin_move: as in `BufferCopy`.
            device: a context in which it may be called, in any thread.
            wants_files: whether the rank would load a version that is written now, and has it from nowhere else.
        """
        self._wants_files = wants_files
        self._known, self._take, self._begin_move, self._device = known, take, begin_move, device
        self._renames: FolderRenames | None = None
        self._is_refused = False
        self._layout: Layout = {}
        self._copy: BufferCopy | None = None
        self._lock = threading.Lock()

    def copied(
        self, place: VersionPlace, files: Mapping[str, Registered], layout: Layout
    ) -> tuple[dict[str, FileOnDevice] | None, int]:
        """Have all of a version's files copied, and follow the next version of its run.

        Args:
            place: the version's folder.
            files: its files.
            layout: of the files.

        Returns:
            Where they will be when the copies that were begun have ended, None where there is no room; and how many
            bytes had been begun before.
        """
        with self._lock:
            copy = self._copy
            if copy is None or not copy.is_of(files, layout):
                self._drop()  # of a version that did not come
                copy = self._new_copy(files, layout)
            self._copy, places, ahead = None, None, 0
            if copy is not None:
                ahead = copy.begun
                copy.finish()
                places = copy.taken()
        self._expect(place, layout)
        return places, ahead

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
                logger.warning("refitd copies no version while it is written: %s", error.strerror)  # it holds frames

    def _watch(self, folder: int) -> None:
        if self._renames is None:
            self._renames = FolderRenames()
            run = partial(self._run, self._renames)
            threading.Thread(target=run, name="refitd-copy-ahead", daemon=True).start()
        self._renames.watch(folder)

    def _new_copy(self, files: Mapping[str, Registered], layout: Layout) -> BufferCopy | None:
        places = self._take(layout)
        if places is None:
            return None
        return BufferCopy(files=files, layout=layout, places=places, begin_move=self._begin_move)

    def _drop(self) -> None:
        if self._copy is not None:
            self._copy.taken()
            self._copy = None

    def _run(self, renames: FolderRenames) -> None:
        while True:
            for name, folder in renames.wait():
                try:
                    if name.startswith(INCOMING_PREFIX):
                        self.follow(folder)
                except Exception:  # it is looked at once more when it has come
                    logger.warning("refitd could not copy a version while it was written", exc_info=True)
                finally:
                    os.close(folder)

    def follow(self, folder: int) -> None:
        """Copy what is written in an open folder until all is copied, the copy was taken, the folder is removed, or the
        trainer falls silent.

        Raises:
            OSError: it cannot be read. CudaDriverError: the driver refused a copy.
        """
        if not self._wants_files():
            return
        with short_turns():
            progress = _begun_progress(folder)
            if progress is None:
                return
            try:
                with self._device():  # memory for the buffer, too, is asked for along the stream that writes it
                    copy = self._begun_copy(folder)
                    if copy is not None:
                        self._follow(copy, folder, progress)
            finally:
                os.close(progress)

    def _begun_copy(self, folder: int) -> BufferCopy | None:
        layout = self._layout
        files = self._files_in(folder, layout)
        if files is None:
            return None
        with self._lock:
            self._drop()  # of a version that did not come
            self._copy = self._new_copy(files, layout)
            return self._copy

    def _files_in(self, folder: int, layout: Layout) -> dict[str, Registered] | None:
        """The files that are written, registered; None where they are others than is expected, or not known."""
        if {name: file.size for name, file in listing_of(folder).items()} != {name: layout[name][0] for name in layout}:
            return None
        files: dict[str, Registered] = {}
        for name in layout:
            with plain_file(name, within=folder) as fd:
                if (file := self._known(fd)) is None:
                    return None
                files[name] = file
        return files

    def _follow(self, copy: BufferCopy, folder: int, progress: int) -> None:
        names, heard, said = sorted(copy.layout), time.monotonic(), ()
        while not copy.is_whole:
            reached = read_progress(progress, len(names))
            now = time.monotonic()
            if reached != said:
                heard, said = now, reached
            with self._lock:
                if self._copy is not copy:
                    return
                if os.fstat(folder).st_nlink == 0 or now - heard > _SILENT_SECONDS:  # given up, or its trainer has died
                    self._drop()
                    return
                for name, end in zip(names, reached, strict=True):
                    copy.advance(name, end)
            time.sleep(_LOOK_SECONDS)


def _begun_progress(folder: int) -> int | None:
    """The open file that says how far the trainer is; None where there is none, as of tensors in host memory."""
    given_up = time.monotonic() + _BEGIN_SECONDS
    while time.monotonic() < given_up:
        with suppress(FileNotFoundError):
            return open_progress(folder)
        time.sleep(_LOOK_SECONDS)
    return None
