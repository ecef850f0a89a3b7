"""Versions as ways into the model: looked at, and made as ready for the pause as they can be.

A version on disk is looked at ahead, by the rank's clerk, or in the pause where nobody has asked for it before; one in
a trainer's memory ahead alone.
"""

from pathlib import Path
from threading import Event

from refitd.catalog.validate import Options
from refitd_sglang.again import Again
from refitd_sglang.changes import Changes
from refitd_sglang.devices import devices_of
from refitd_sglang.footing import Footing
from refitd_sglang.keeper import Keeper
from refitd_sglang.laid import Ways
from refitd_sglang.loading import Loading
from refitd_sglang.looking import Looking, room_on
from refitd_sglang.offered import Offered, open_offer
from refitd_sglang.plan import Plan
from refitd_sglang.source import Source, SourceRefusedError, place_of
from refitd_sglang.sparse import Sparse
from refitd_sglang.stages import Stages
from refitd_sglang.versions import Runner
from refitd_sglang.way import Way
from refitd_sglang.whole import Whole


class Preparing:
    """One rank's. `looking`, `loading` and `footing` are what it goes by."""

    def __init__(self, runner: Runner, root: Path | None, loading: Loading, footing: Footing) -> None:
        """Nothing is open yet."""
        self._root, self._loading, self._footing = root, loading, footing
        self._device = next(iter(devices_of(runner.model)), None)
        self.looking = Looking(str(runner.config.model_path), runner.config, room_on(self._device))
        self.keeper = Keeper()

    def here(self, path: str, *, check_bytes: bool) -> Way:
        """Look in this thread. Raises as `Looking.here`."""
        if (standing := self._footing.at(path)) is not None:
            return Again(standing, self._loading)
        options = Options()
        return self._way(self.looking.here(place_of(path, self._root), options, check_bytes=check_bytes), options)

    def ahead(self, path: str, options: Options, *, check_bytes: bool, stop: Event, stages: Stages) -> Way:
        """Look while the engine serves. Raises as `Looking.here`."""
        place = place_of(path, self._root)
        found = self.looking.ahead(place, options, check_bytes=check_bytes, stop=stop, ways=self._ways, stages=stages)
        return self._way(found, options)

    def offered(self, path: str, offer: str) -> Offered:
        """Look at what a trainer offers, whose files will be at `path`.

        Raises:
            SourceRefusedError: it is not one to load now. OSError: it cannot be read.
        """
        if self._footing.has_no_files:
            raise SourceRefusedError("what is served came from memory, and has no files yet to be put back from")
        place = place_of(path, self._root)
        return open_offer(place, offer, self.looking.known, self._loading, self.keeper, self._device)

    def make_ready(self, way: Way) -> None:
        """Do what can be done while the engine serves.

        Raises:
            SourceRefusedError: it does not fit what is served. OSError: it cannot be read.
        """
        if isinstance(way, Sparse):
            way.look(self._footing.standing)
        elif isinstance(way, Offered):
            way.make_ready()
        elif isinstance(way, Whole) and not way.partial:
            way.readied = self._loading.make_ready(way.source)

    def _way(self, found: Source | Changes, options: Options) -> Way:
        return Sparse(found, self._loading) if isinstance(found, Changes) else Whole(found, options, self._loading)

    def _ways(self) -> Ways | None:
        """How a delta gets into what is served now, if it does."""
        standing = self._footing.standing
        inventory = None if standing is None else standing.source.inventory
        plan = None if inventory is None else self._loading.plan_for_deltas(inventory, look=False)
        if standing is None or not isinstance(plan, Plan):
            return None
        return self._loading.derived(plan, standing.source).ways
