"""Versions as update sources: looked at, and made as ready for the pause as they can be.

A version on disk is looked at ahead of an update, by the rank's prefetch worker or, without one, in the rank's thread;
or in the pause where it was not asked for before. One in a trainer's memory is looked at ahead alone.

`RestorePoint` is the version that a rank serves, and what it would be put back from. What came from a trainer's memory
can be put back when its files have followed. A thread beside the engine's own opens them as soon as they are there. To
open them when the next version is prepared has its trainer wait, 20 ms for 3 GB on an H200: a look at a folder is some
hundred steps, and each of them waits for SGLang's loop.

One that gets no files cannot be put back. If the next update fails after its first write, the contents are unknown, and
the service loads a version that has files.
"""

import logging
import threading
import time
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from threading import Event, Lock
from typing import Any, assert_never

from refitd_client.checkpoint.inventory import Reference
from refitd_client.transport.device import uuid_of
from refitd_client.validation.contents import ReadingStoppedError
from refitd_client.validation.validate import Options
from refitd_plugin.channel import short_turns
from refitd_plugin.delta.changes import DeltaChanges, is_delta, most_memory, open_changes
from refitd_plugin.delta.in_place import DeltaInPlace
from refitd_plugin.delta.layout import Placements
from refitd_plugin.memory.imported import IpcHandleCache
from refitd_plugin.memory.offered import OfferedMemory, OfferedVersion, memory_of, with_files
from refitd_plugin.memory.source import (
    FullNeededError,
    SourceRefusedError,
    VersionPlace,
    VersionSource,
    folder_of,
    is_version,
    mapped,
    open_version,
    place_of,
    reference_in,
    started_from,
)
from refitd_plugin.port import EngineProcess, Stages
from refitd_plugin.prefetch import (
    BufferLease,
    DeltaBuffer,
    DeltaRead,
    FullRead,
    Mapper,
    PlainMapping,
    PrefetchWorker,
    ReadOrder,
    Refusal,
    Reply,
    delta_changes,
)
from refitd_plugin.proof.contents import devices_of
from refitd_plugin.proof.proving import VersionProver
from refitd_plugin.update.loading import Loading
from refitd_plugin.update.plan import ReplayPlan
from refitd_plugin.update.receiving import AnnouncedNeeds, RankReceiver, sizes_of
from refitd_plugin.update.update_source import FullVersion, ServedAgain, ServedState, UpdateSource

_RESTORE_LOOK_SECONDS = 0.1
_LESS_OFTEN = 2.0  # where opening them failed: it says why in the log, and the next prepare says it to the service
logger = logging.getLogger("refitd_plugin")


class RestorePoint:
    """What one rank serves. `revision` is that of the model which the server was started with, on the hub."""

    def __init__(self, root: Path | None, revision: str | None) -> None:
        self.served_state: ServedState | None = None
        self._root, self._revision = root, revision
        self._lock, self._turn, self._wanted = Lock(), Lock(), Event()
        self._thread: threading.Thread | None = None

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
            self._wanted.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._follow_files, name="refitd-following", daemon=True)
                self._thread.start()

    def _follow_files(self) -> None:
        """Look for the files of what came from memory, again and again until they are there."""
        while True:
            self._wanted.wait()
            self._wanted.clear()
            is_done = False
            while not is_done:
                try:
                    with short_turns():
                        is_done = self.fall_back_on_files()
                except Exception as error:  # the thread goes on: the next versions need it
                    logger.warning("the files of what is served cannot be opened yet: %s", error)
                    time.sleep(_LESS_OFTEN)
                time.sleep(_RESTORE_LOOK_SECONDS)

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


_ERRORS: dict[str, type[Exception]] = {
    "refused": SourceRefusedError,
    "full": FullNeededError,
    "stopped": ReadingStoppedError,
    "unreadable": OSError,
}
"""The error of each kind of refusal but `unable`."""


def buffer_mapper(device: Any) -> Mapper:
    if device is None:
        return PlainMapping
    from refitd_plugin.memory.driver import Registered

    return partial(Registered, device=device.index or 0)


class Preparing:
    """Makes versions ready for one rank. `root` is the service's, where the settings name it."""

    def __init__(
        self,
        process: EngineProcess,
        root: Path | None,
        loading: Loading,
        restore_point: RestorePoint,
        prover: VersionProver | None = None,
    ) -> None:
        self._root, self._loading, self._restore_point = root, loading, restore_point
        self._prover = prover
        self._device = next(iter(devices_of(process.model)), None)
        self._startup, self._revision = process.model_path, process.revision  # an update changes the path
        self._folder: Path | None = None
        self._reference: Reference | None = None
        self.worker = PrefetchWorker()
        self._map_buffer, self._free = buffer_mapper(self._device), list[DeltaBuffer]()
        self._sent: tuple[int, Placements | None] = 0, None
        self.handle_cache = IpcHandleCache()
        self.receiver, self._announced_needs = RankReceiver(self._device), AnnouncedNeeds()
        self._received = ""  # the needs of the last transfer

    def here(self, path: str) -> UpdateSource:
        """Look in this thread.

        Raises:
            SourceRefusedError: it is not one to load into this model. OSError: it cannot be read.
        """
        if (served_state := self._restore_point.at(path)) is not None:
            return ServedAgain(served_state, self._loading)
        options = Options()
        return self._update_source(self._look(place_of(path, self._root), options, check_bytes=True), options)

    def ahead(self, path: str, options: Options, *, check_bytes: bool, stop: Event, stages: Stages) -> UpdateSource:
        """Look while the engine serves, through the prefetch worker where that reads more than headers. Raises as
        `here`, and ReadingStoppedError: `stop` was set.
        """
        place = place_of(path, self._root)
        delta, model = is_delta(str(place.folder)), ""
        if not (delta or check_bytes):
            return self._update_source(self._look(place, options, check_bytes=False, stop=stop), options)
        with suppress(SourceRefusedError) if delta else nullcontext():  # a delta can be looked at without the model
            model = str(self._model())
        order = ReadOrder(
            root=str(place.root),
            path=place.path,
            model=model,
            check_bytes=check_bytes,
            options=options,
            is_delta=delta,
        )
        by = self._placements() if delta else None
        reply, lease = self._asked(order, by, stop)
        match reply:
            case None | Refusal(kind="unable"):
                return self._update_source(self._look(place, options, check_bytes=check_bytes, stop=stop), options)
            case Refusal():
                raise _ERRORS[reply.kind](reply.reason)
            case DeltaRead():
                found = delta_changes(place, reply, lease, by)
            case FullRead():
                found = self._look(place, options, check_bytes=False)
                if isinstance(found, DeltaChanges) or found.structure.signature != reply.signature:
                    raise SourceRefusedError(f"{place.folder} changed while it was looked at")
            case _:
                assert_never(reply)
        stages.add("clerk", reply.ms)  # a word of the reply: it stays
        return self._update_source(found, options)

    def _look(
        self, place: VersionPlace, options: Options, *, check_bytes: bool, stop: Event | None = None
    ) -> VersionSource | DeltaChanges:
        if not is_delta(str(place.folder)):
            return open_version(place, self.known(), options, check_bytes=check_bytes, stop=stop)
        reference = None
        with suppress(SourceRefusedError):
            reference = self.known()
        return open_changes(place, check_bytes=check_bytes, most=most_memory(reference))

    def _asked(self, order: ReadOrder, by: Placements | None, stop: Event) -> tuple[Reply | None, BufferLease]:
        """Ask the prefetch worker. Placements are sent once to each process."""
        lease, generation = BufferLease(self._free, self._map_buffer), self.worker.generation
        if by is not None:
            order.lays_out = True
            if self._sent[0] != generation or self._sent[1] is not by:
                order.placements = dict(by)
        reply = self.worker.ask(order, stop, lease.buffer.fd)
        if reply is None:
            self._free = []  # a process that is lost may still be writing: no delta comes into these buffers any more
            if generation:
                self.worker.begin()
        elif by is not None:
            self._sent = generation, by
        return reply, lease

    def known(self) -> Reference:
        """The model that the server was started with, by its files' headers."""
        if self._reference is None:
            self._reference = reference_in(self._model())
        return self._reference

    def _model(self) -> Path:
        if self._folder is None:
            self._folder = folder_of(self._startup, self._revision)
        return self._folder

    def offered(self, path: str, offer: str, stop: Event) -> OfferedVersion:
        """Look at what a trainer offers. Where it sends that to this rank over a process group, wait until it is here.
        `offer`: the path of the offer's file beneath the root.

        Raises:
            SourceRefusedError: it is not one to load now. OSError: it cannot be read.
        """
        if self._restore_point.awaits_files:
            raise SourceRefusedError("what is served came from memory, and has no files yet to be put back from")
        place = place_of(path, self._root)
        announced, sliced = self.handle_cache.announced(place.root, offer), None
        if announced.transfer is not None and self.receiver.name in announced.transfer.receivers:
            needs = announced.transfer.needs.get(self.receiver.name, "")
            if needs:
                sliced = self._loading.plan
                if self.needs(place.root) != needs:
                    raise SourceRefusedError("this rank needs other parts of the tensors than are sent to it")
            if needs != self._received:  # the receiver gives back memory that this rank may have open
                self.handle_cache.close()
                self._received = needs
            offer = self.receiver.receive(place.root, offer, stop, needs)
        elif announced.transfer is not None and announced.transfer.senders > 1:
            raise SourceRefusedError("each rank of the trainer has a part of it, and none is sent to this rank")
        imported, opened = self.handle_cache.import_offer(place.root, offer)
        known, on_device = self.known, self._device is not None
        source = memory_of(place, imported.offer, announced, opened, self.handle_cache, known, on_device=on_device)
        return OfferedVersion(
            source=source, loading=self._loading, imported=imported, device=self._device, sliced=sliced
        )

    def needs(self, root: Path) -> str:
        """The digest of what this rank needs of a version, "" for everything."""
        served_state = self._restore_point.served_state
        sizes = None if served_state is None else sizes_of(served_state.source.structure)
        return self._announced_needs.digest(self._loading.plan, sizes, root, self.receiver.name)

    def make_ready(self, update_source: UpdateSource) -> None:
        """Do what can be done while the engine serves.

        Raises:
            SourceRefusedError: it does not fit what is served. OSError: it cannot be read.
        """
        if isinstance(update_source, DeltaInPlace):
            update_source.look(self._restore_point.served_state)
        elif isinstance(update_source, OfferedVersion):
            update_source.make_ready()
        elif isinstance(update_source, FullVersion) and not update_source.partial:
            update_source.readied = self._loading.make_ready(update_source.source)

    @property
    def device_name(self) -> str:
        """The UUID of the GPU that holds the model, "" where none does."""
        return "" if self._device is None else uuid_of(self._device)

    @property
    def proves(self) -> bool:
        return self._prover is not None

    def prove(self, update_source: UpdateSource) -> None:
        """Read this rank's share of a full version, and note what was found.

        Raises:
            OSError: it cannot be read.
        """
        if self._prover is None or not isinstance(update_source, FullVersion) or update_source.partial:
            return
        if isinstance(update_source, OfferedVersion):
            return  # the trainer has its bytes
        update_source.proof = self._prover.prove(update_source.source)

    def _update_source(self, found: VersionSource | DeltaChanges, options: Options) -> UpdateSource:
        if isinstance(found, DeltaChanges):
            return DeltaInPlace(found, self._loading)
        return FullVersion(found, options, self._loading)

    def _placements(self) -> Placements | None:
        """The placements for a delta to what is served now, if it can be laid out."""
        served_state = self._restore_point.served_state
        inventory = None if served_state is None else served_state.source.inventory
        plan = None if inventory is None else self._loading.plan_for_deltas(inventory, look=False)
        if served_state is None or not isinstance(plan, ReplayPlan):
            return None
        return self._loading.tables(plan, served_state.source).placements
