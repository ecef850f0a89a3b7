"""A version in a trainer's memory on this host, on its way into a model: by the load plan, like one on disk.

Of an offer only its file is read before the pause. In the pause it is held while the tensors are copied: the trainer
waits for that. What was copied counts if the trainer lives and stands by it then, and the fingerprints are the offer's.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from refitd_client.checkpoint.inventory import Reference
from refitd_client.contract.naming import SERVICE_FOLDER, parse_version_folder
from refitd_client.transport.ipc.device import uuid_of
from refitd_client.transport.ipc.offer import Offer, OfferRefusedError
from refitd_client.transport.ipc.offer_file import ImportedTensors
from refitd_plugin.contents import equal_names, first_difference
from refitd_plugin.copy_schedule import table_of
from refitd_plugin.imported import IpcHandleCache
from refitd_plugin.loading import Loading, Readied
from refitd_plugin.offered_memory import OfferedMemory, memory_of
from refitd_plugin.plan import ReplayPlan
from refitd_plugin.port import UpdateCall
from refitd_plugin.served import ServedState
from refitd_plugin.source import SourceRefusedError, VersionPlace
from refitd_plugin.tensor_feed import TensorFeed
from refitd_plugin.update_source import UpdateSource

_UNLEARNED = (
    "it has not been seen yet how this model is loaded: from a GPU's memory it is taken after a load from files"
)
_ON_ANOTHER_GPU = "it is on another GPU, and the model's loader computes with some of it: that needs files"


class OfferedVersion(UpdateSource):
    """See `UpdateSource`: `folder` is where its files will be, and it is unchanged as long as it is offered.

    The model is on `device`, where it is on a GPU. Where `sliced` is a load plan, only what that copies was received:
    by no other way may it be loaded.
    """

    kind = "handover"

    def __init__(
        self,
        *,
        source: OfferedMemory,
        loading: Loading,
        imported: ImportedTensors,
        device: torch.device | None = None,
        sliced: ReplayPlan | None = None,
    ) -> None:
        folder, nbytes = source.place.folder, source.nbytes
        super().__init__(loading, label=source.label, digest=source.digest, folder=folder, nbytes=nbytes)
        self.source, self.imported, self.device = source, imported, device
        self.readied: Readied | None = None
        self._sliced = sliced
        self._fits = False  # in this pause: the plan of what was made ready
        self._others: list[int] | None = None
        self._fingerprints: list[tuple[str, int]] = []

    def is_unchanged(self) -> bool:
        return self.imported.is_exported

    @property
    def watches(self) -> bool:
        ready = self.readied
        self._fits = ready is not None and self.loading.has(ready.plan)
        return self._fits and ready is not None and ready.schedule.watch is not None

    def make_ready(self) -> None:
        """Do all that can be done before the pause: nothing, where it was done for the same places and plan.

        Raises:
            SourceRefusedError: it cannot be taken from there.
        """
        self._check_slices()
        opened, plan = self.source.opened, self.loading.plan
        if opened.readied is None or opened.readied.plan is not plan:
            self._plan_for(plan)
            opened.readied = self.loading.make_ready(self.source)
        self.readied = opened.readied

    def fit(self, served_state: ServedState | None, contents: dict[str, str]) -> None:
        """It fits whatever is there: its tensors are those of the model."""

    def write(self, call: UpdateCall) -> tuple[TensorFeed, str | None]:
        """See `UpdateSource`. From here to the end of `check` the trainer waits."""
        loaded = False
        try:
            self._check_slices()
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
            self._fingerprints = self.loading.fingerprints(self.source, contents, self._others)
            self.proved = equal_names(self._fingerprints, expected)
            self.slice_check = self.loading.slice_check(self.source, expected, "the offer")
            fault = first_difference(self._fingerprints, expected)
            return None if fault is None else fault.replace("the manifest says", "the offer says")
        finally:
            self._over()

    def put_back(self, call: UpdateCall, previous: ServedState | None, path: str) -> tuple[TensorFeed, str | None]:
        self.source.handle_cache.close()  # what was opened may not be what the trainer has there now
        return super().put_back(call, previous, path)

    def served_state(self, contents: dict[str, str]) -> ServedState | None:
        """See `UpdateSource`. Its files are not there yet: see `with_files`."""
        sums = None if self.slice_check is None else self.slice_check.found
        return ServedState(source=self.source, contents=contents, fingerprints=self._fingerprints, slice_sums=sums)

    def _check_slices(self) -> None:
        """Refuse a load that reads more than was received.

        Raises:
            SourceRefusedError: the rank loads in another way than when it was received.
        """
        plan = self._sliced
        if plan is None:
            return
        if self.loading.plan is not plan or not plan.proven or not plan.fits(self.source.inventory, self.loading.model):
            raise SourceRefusedError("only parts of it were received, and this rank has another way to load now")

    def _given(self) -> OfferedMemory:
        """What the load works with."""
        if not self.source.opened.is_on_device:
            return self.source  # mapped so that nothing is written to it
        plan = self.loading.plan if self._fits else self._plan_for(self.loading.plan)
        return replace(self.source, loaded=frozenset(() if plan is None else plan.residual))

    def _plan_for(self, plan: ReplayPlan | None) -> ReplayPlan | None:
        """The plan, where the trainer's memory can be read along it. Host memory can, also without one.

        Raises:
            SourceRefusedError: it cannot.
        """
        opened = self.source.opened
        if not opened.is_on_device:
            return plan
        if plan is None or not plan.replays or not plan.proven or not self.loading.has(plan):
            raise SourceRefusedError(_UNLEARNED)
        if opened.is_in_parts:  # whole tensors are put together by the driver, from any GPU
            return plan
        if any(place.device != uuid_of(self.device) for place in opened.places.values()) and (
            plan.residual or table_of(plan.copies, self.source.structure.headers).rest
        ):
            raise SourceRefusedError(_ON_ANOTHER_GPU)
        return plan

    def _over(self) -> None:
        self.imported.release()
        self.imported.close()


def open_offer(
    place: VersionPlace,
    offer: str,
    reference: Callable[[], Reference],
    loading: Loading,
    handle_cache: IpcHandleCache,
    device: torch.device | None,
    announced: Offer,
    sliced: ReplayPlan | None = None,
) -> OfferedVersion:
    """Look at an offer.

    Args:
        place: where the version's files will be.
        offer: the path of the offer's file beneath the root.
        reference: describes the model.
        loading: the rank's loads.
        handle_cache: the memory that the rank has open.
        device: the model's GPU, None where it is on none.
        announced: the trainer's offer: this one, or that of what was received.
        sliced: the load plan whose copies alone can be made of it, None where it is whole.

    Raises:
        SourceRefusedError: it is not one to load into the model that `reference` describes.
        OSError: it cannot be read.
    """
    imported, opened = handle_cache.import_offer(place.root, offer)
    source = memory_of(place, imported.offer, announced, opened, handle_cache, reference, on_device=device is not None)
    return OfferedVersion(source=source, loading=loading, imported=imported, device=device, sliced=sliced)


def is_promised(path: str) -> bool:
    """Whether a version's files may yet come here: a root's folder of that name, and nothing there."""
    folder = Path(path)
    return (
        parse_version_folder(folder.name) is not None
        and not folder.exists()
        and any((above / SERVICE_FOLDER).is_dir() for above in folder.absolute().parents)
    )
