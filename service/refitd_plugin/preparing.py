"""Versions as update sources: looked at, and made as ready for the pause as they can be.

A version on disk is looked at ahead, by the rank's prefetch worker, or in the pause where it was not asked for before;
one in a trainer's memory ahead alone.
"""

from pathlib import Path
from threading import Event

from refitd_client.validation.validate import Options
from refitd_plugin.again import ServedAgain
from refitd_plugin.changes import DeltaChanges
from refitd_plugin.devices import devices_of
from refitd_plugin.imports import IpcHandleCache
from refitd_plugin.layout import Placements
from refitd_plugin.loading import Loading
from refitd_plugin.looking import Looking, buffer_mapper
from refitd_plugin.offered import OfferedVersion, open_offer
from refitd_plugin.plan import ReplayPlan
from refitd_plugin.port import EngineProcess
from refitd_plugin.restore_point import RestorePoint
from refitd_plugin.source import SourceRefusedError, VersionSource, place_of
from refitd_plugin.sparse import DeltaInPlace
from refitd_plugin.stages import Stages
from refitd_plugin.update_source import UpdateSource
from refitd_plugin.whole import FullVersion


class Preparing:
    """One rank's. `looking`, `loading` and `restore_point` are what it goes by."""

    def __init__(
        self, process: EngineProcess, root: Path | None, loading: Loading, restore_point: RestorePoint
    ) -> None:
        """Nothing is open yet."""
        self._root, self._loading, self._restore_point = root, loading, restore_point
        self._device = next(iter(devices_of(process.model)), None)
        self.looking = Looking(process.model_path, process.revision, buffer_mapper(self._device))
        self.handle_cache = IpcHandleCache()

    def here(self, path: str, *, check_bytes: bool) -> UpdateSource:
        """Look in this thread. Raises as `Looking.here`."""
        if (served_state := self._restore_point.at(path)) is not None:
            return ServedAgain(served_state, self._loading)
        options = Options()
        return self._update_source(
            self.looking.here(place_of(path, self._root), options, check_bytes=check_bytes), options
        )

    def ahead(self, path: str, options: Options, *, check_bytes: bool, stop: Event, stages: Stages) -> UpdateSource:
        """Look while the engine serves. Raises as `Looking.here`."""
        place = place_of(path, self._root)
        found = self.looking.ahead(
            place, options, check_bytes=check_bytes, stop=stop, placements=self._placements, stages=stages
        )
        return self._update_source(found, options)

    def offered(self, path: str, offer: str) -> OfferedVersion:
        """Look at what a trainer offers, whose files will be at `path`.

        Raises:
            SourceRefusedError: it is not one to load now. OSError: it cannot be read.
        """
        if self._restore_point.has_no_files:
            raise SourceRefusedError("what is served came from memory, and has no files yet to be put back from")
        place = place_of(path, self._root)
        return open_offer(place, offer, self.looking.known, self._loading, self.handle_cache, self._device)

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

    def _update_source(self, found: VersionSource | DeltaChanges, options: Options) -> UpdateSource:
        return (
            DeltaInPlace(found, self._loading)
            if isinstance(found, DeltaChanges)
            else FullVersion(found, options, self._loading)
        )

    def _placements(self) -> Placements | None:
        """How a delta gets into what is served now, if it does."""
        served_state = self._restore_point.served_state
        inventory = None if served_state is None else served_state.source.inventory
        plan = None if inventory is None else self._loading.plan_for_deltas(inventory, look=False)
        if served_state is None or not isinstance(plan, ReplayPlan):
            return None
        return self._loading.derived(plan, served_state.source).placements
