"""A version in a trainer's memory on this host, on its way into a model: by the load plan, like one on disk.

Of an offer only its file is read before the pause. In the pause it is held while the tensors are copied: the trainer
waits for that. What was copied counts if the trainer lives and stands by it then, and the fingerprints are the offer's.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from refitd_client.checkpoint.inventory import Reference
from refitd_client.contract.naming import SERVICE_FOLDER, parse_version_folder
from refitd_client.transport.ipc.device import uuid_of
from refitd_client.transport.ipc.offer import OfferRefusedError
from refitd_client.transport.ipc.offer_file import ImportedTensors
from refitd_plugin.contents import differing, equal
from refitd_plugin.copy_schedule import table_of
from refitd_plugin.imported import OfferedMemory, memory_of
from refitd_plugin.imports import IpcHandleCache
from refitd_plugin.served import ServedState
from refitd_plugin.source import SourceRefusedError, VersionPlace
from refitd_plugin.tensor_feed import TensorFeed

if TYPE_CHECKING:
    from refitd_plugin.loading import Loading, Readied
    from refitd_plugin.plan import ReplayPlan
    from refitd_plugin.port import UpdateCall

_UNLEARNED = (
    "it has not been seen yet how this model is loaded: from a GPU's memory it is taken after a load from files"
)
_ELSEWHERE = "it is on another GPU, and the model's loader computes with some of it: that needs files"


@dataclass(slots=True, eq=False, kw_only=True)
class OfferedVersion:
    """See `UpdateSource`."""

    source: OfferedMemory
    loading: "Loading"
    imported: ImportedTensors
    device: torch.device | None = None
    readied: "Readied | None" = None
    proved: int = 0
    _fits: bool = False  # in this pause: the plan of what was made ready
    _others: list[int] | None = None
    _prints: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])

    kind = "handover"

    @property
    def label(self) -> str:
        """See `UpdateSource`."""
        return self.source.label

    @property
    def digest(self) -> str:
        """See `UpdateSource`."""
        return self.source.digest

    @property
    def signature(self) -> str:
        """See `UpdateSource`."""
        return self.source.digest

    @property
    def nbytes(self) -> int:
        """See `UpdateSource`."""
        return self.source.nbytes

    @property
    def folder(self) -> Path:
        """Where its files will be."""
        return self.source.place.folder

    def is_unchanged(self) -> bool:
        """See `UpdateSource`: whether it is still offered."""
        return self.imported.is_exported

    @property
    def watches(self) -> bool:
        """See `UpdateSource`."""
        ready = self.readied
        self._fits = ready is not None and self.loading.has(ready.plan)
        return self._fits and ready is not None and ready.schedule.watch is not None

    def make_ready(self) -> None:
        """Do all that can be done before the pause: nothing, where it was done for the same places and plan.

        Raises:
            SourceRefusedError: it cannot be taken from there.
        """
        opened, plan = self.source.opened, self.loading.plan
        if opened.readied is None or opened.readied.plan is not plan:
            self._plan_for(plan)
            opened.readied = self.loading.make_ready(self.source)
        self.readied = opened.readied

    def fit(self, served_state: ServedState | None, contents: dict[str, str]) -> None:
        """It fits whatever is there: its tensors are those of the model."""

    def write(self, call: "UpdateCall") -> tuple[TensorFeed, str | None]:
        """See `UpdateSource`. From here to the end of `check` the trainer waits."""
        loaded = False
        try:
            with self.source.handle_cache.holding(self.source.opened):
                self.imported.hold()
                feed, fault = self.loading.load(call, self._given(), partial=False, readied=self.readied)
        except (OfferRefusedError, SourceRefusedError) as error:
            return TensorFeed({}), str(error)
        else:
            self._others, loaded = feed.others, fault is None
            return feed, fault
        finally:
            if not loaded:
                self._over()

    def check(self, contents: dict[str, str]) -> str | None:
        """See `UpdateSource`: all that is only copied has the offer's fingerprints, and the trainer stands by it."""
        try:
            if not self.imported.is_exported:
                return "the trainer is gone, or took its tensors back while they were copied"
            expected = self.source.offer.expected
            self._prints = self.loading.prints(self.source, contents, self._others)
            self.proved = equal(self._prints, expected)
            fault = differing(self._prints, expected)
            if fault is not None:
                self.source.handle_cache.close()  # what was opened may not be what the trainer has there now
            return None if fault is None else fault.replace("refit.json says", "the offer says")
        finally:
            self._over()

    def put_back(self, call: "UpdateCall", previous: ServedState | None, path: str) -> tuple[TensorFeed, str | None]:
        """See `UpdateSource`: through the loader, since the plan may be at fault."""
        if previous is None:
            return TensorFeed({}), "what was served before cannot be read any more"
        return self.loading.put_back(call, previous.tensors(), path)

    def served_state(self, contents: dict[str, str]) -> ServedState | None:
        """See `UpdateSource`. Its files are not there yet: see `with_files`."""
        return ServedState(source=self.source, contents=contents, prints=self._prints)

    def _given(self) -> OfferedMemory:
        """What the load works with."""
        if not self.source.opened.is_on_device:
            return self.source  # mapped so that nothing is written to it
        plan = self.loading.plan if self._fits else self._plan_for(self.loading.plan)
        return replace(self.source, loaded=frozenset(() if plan is None else plan.residual))

    def _plan_for(self, plan: "ReplayPlan | None") -> "ReplayPlan | None":
        """The plan, where the trainer's memory can be read along it. Host memory can, also without one.

        Raises:
            SourceRefusedError: it cannot.
        """
        opened = self.source.opened
        if not opened.is_on_device:
            return plan
        if plan is None or not plan.replays or not plan.proven or not self.loading.has(plan):
            raise SourceRefusedError(_UNLEARNED)
        if any(place.device != uuid_of(self.device) for place in opened.places.values()) and (
            plan.residual or table_of(plan.copies, self.source.structure.headers).rest
        ):
            raise SourceRefusedError(_ELSEWHERE)
        return plan

    def _over(self) -> None:
        self.imported.release()
        self.imported.close()


def open_offer(
    place: VersionPlace,
    offer: str,
    reference: Callable[[], Reference],
    loading: "Loading",
    handle_cache: IpcHandleCache,
    device: torch.device | None,
) -> OfferedVersion:
    """Look at an offer of the version that will be at `place`; `offer` is its file's path beneath the root. The model
    is on `device`, where it is on a GPU.

    Raises:
        SourceRefusedError: it is not one to load into the model that `reference` describes.
        OSError: it cannot be read.
    """
    imported, opened = handle_cache.import_offer(place.root, offer)
    source = memory_of(place, imported.offer, opened, handle_cache, reference, on_device=device is not None)
    return OfferedVersion(source=source, loading=loading, imported=imported, device=device)


def is_promised(path: str) -> bool:
    """Whether a version's files may yet come here: a root's folder of that name, and nothing there."""
    folder = Path(path)
    return (
        parse_version_folder(folder.name) is not None
        and not folder.exists()
        and any((above / SERVICE_FOLDER).is_dir() for above in folder.absolute().parents)
    )
