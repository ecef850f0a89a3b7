"""A version in a trainer's memory on this host, on its way into a model: by the load plan, like one on disk.

Of an offer only its file is read before the pause. In the pause it is held while the tensors are copied: the trainer
waits for that. What was copied counts if the trainer lives and stands by it then, and the fingerprints are the offer's.

As a source of loads its allocations are its files. Where ranks of a trainer lend parts of it, the parts are what its
files have (`imported.LentPieces`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from refitd_client.checkpoint.header import Header, TensorSpec
from refitd_client.checkpoint.inventory import Inventory, Reference, Tensor, compare, inventory_of, listed, not_a_copy
from refitd_client.contract.naming import SERVICE_FOLDER, parse_version_folder, parse_version_id, version_folder
from refitd_client.transport.device import uuid_of
from refitd_client.transport.offer import HostPlace, Offer, OfferRefusedError
from refitd_client.transport.offer_file import ImportedTensors
from refitd_client.validation.validate import Options, Structure
from refitd_plugin.memory.copy_schedule import table_of
from refitd_plugin.memory.imported import IpcHandleCache, LentPieces, OpenedMemory, cut_copies
from refitd_plugin.memory.source import SourceRefusedError, VersionPlace, VersionSource, is_version, mapped
from refitd_plugin.port import UpdateCall
from refitd_plugin.update.loading import Loading, TensorFeed
from refitd_plugin.update.plan import ReplayPlan
from refitd_plugin.update.update_source import FullVersion, ServedState

if TYPE_CHECKING:
    from refitd_plugin.update.recorder import PlanCopy


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedMemory(VersionSource):
    """A `VersionSource` of a trainer's memory.

    `offer` says where the tensors lie, `announced` is the trainer's: another one where they were sent to this rank.
    `loaded` names the tensors that go through the model's loader, which gets copies of them: it may work in place on
    what it is given, and a GPU's memory is the trainer's own.
    """

    offer: Offer
    announced: Offer
    opened: OpenedMemory
    handle_cache: IpcHandleCache
    loaded: frozenset[str] = frozenset()

    @property
    def digest(self) -> str:
        return self.structure.signature

    @property
    def label(self) -> str:
        return self.offer.version

    @property
    def nbytes(self) -> int:
        return self.opened.nbytes

    def is_unchanged(self) -> bool:
        """Always False: once the offer is over, only the version's files may be read."""
        return False

    @property
    def is_on_device(self) -> bool:
        return self.opened.is_on_device

    def registered(self, registry: Any, device: int) -> dict[str, Any] | None:
        """The address of each allocation or file, seen from a GPU; None where it cannot be read there."""
        return self.handle_cache.addresses(self.opened, device)

    def tensors(self) -> dict[str, Any]:
        """Views of the tensors, and copies of those that are `loaded`; of tensors in parts copies alone, on a GPU only
        of those that are `loaded`.
        """
        if self.opened.is_in_parts:
            pieces = self.pieces()
            names = self.loaded if self.opened.is_on_device else self.opened.tensors
            return {name: pieces[name] for name in self.opened.tensors if name in names}
        views = {tensor.name: self.handle_cache.tensor(tensor) for tensor in self.opened.layout.tensors}
        return views | {name: views[name].clone() for name in self.loaded}

    @property
    def cut(self) -> object:
        return self.opened.layout if self.opened.is_in_parts else None

    def copies_of(self, copies: "Sequence[PlanCopy]") -> "Sequence[PlanCopy]":
        """As `VersionSource`: cut along the parts."""
        return cut_copies(copies, self.opened.tensors) if self.opened.is_in_parts else copies

    def pieces(self) -> Mapping[str, Any]:
        """As `VersionSource`: views of the parts, and whole tensors put together when they are asked for."""
        if not self.opened.is_in_parts:
            return self.tensors()
        device = torch.cuda.current_device() if self.opened.is_on_device else None
        addresses = {} if device is None else self.handle_cache.addresses(self.opened, device) or {}
        return LentPieces(self.opened.tensors, self.opened.pieces, self.handle_cache.tensor, addresses)


def memory_of(
    place: VersionPlace,
    offer: Offer,
    announced: Offer,
    opened: OpenedMemory,
    handle_cache: IpcHandleCache,
    reference: Callable[[], Reference],
    *,
    on_device: bool,
) -> OfferedMemory:
    """What is offered for `place`, held against the model the first time that this memory is offered. `announced`: the
    trainer's own offer, the same for all ranks.

    Raises:
        SourceRefusedError: it is of another version, or not for this model.
    """
    if (announced.version, announced.expected) != (offer.version, offer.expected):
        raise SourceRefusedError(f"what was received is not the {announced.version} that the trainer offers")
    parsed = parse_version_id(offer.version)
    if parsed is None or place.path != f"{parsed[0]}/{version_folder(parsed[1])}":
        raise SourceRefusedError(f"the offer is of {offer.version}, whose files will not be at {place.path}")
    if opened.structure is None:
        if opened.is_on_device and not on_device:
            raise SourceRefusedError("the trainer's tensors are on a GPU, and this model is not")
        structure, model = structure_of(opened), reference()
        if differences := compare(structure.inventory, model):
            raise SourceRefusedError(f"the offer does not fit the model: {listed(differences)}")
        opened.structure = structure
        opened.pairs = model.pairs_in(structure.inventory)
    for copy, first in opened.pairs.items():
        if offer.expected[copy] != offer.expected[first]:
            raise SourceRefusedError(not_a_copy(copy, first))
    hasher = xxhash.xxh3_128(announced.line)
    hasher.update(f"{announced.version}\n{announced.fingerprints}".encode())
    structure = replace(opened.structure, path=place.path, signature=f"offer:{hasher.hexdigest()}")
    return OfferedMemory(
        place=place,
        structure=structure,
        maps={},
        offer=offer,
        announced=announced,
        opened=opened,
        handle_cache=handle_cache,
    )


def with_files(served_state: ServedState) -> ServedState | None:
    """A state that came from memory, with its files as the source; None where they are not there yet.

    Raises:
        SourceRefusedError, OSError: they are there, and cannot be opened.
    """
    if not is_version(str(served_state.source.place.folder), served_state.source.place.root):
        return None
    return replace(served_state, source=mapped(served_state.source.place))


def structure_of(opened: OpenedMemory) -> Structure:
    """What a look at files with this layout would find. Headers have the pieces of tensors that lie in parts."""
    tensors: dict[str, dict[str, TensorSpec]] = {}
    for each in opened.pieces.values():
        where = each.place.path if isinstance(each.place, HostPlace) else each.place.handle.hex()
        spec = TensorSpec(each.dtype, each.shape, each.place.offset, each.place.offset + each.nbytes)
        tensors.setdefault(where, {})[each.name] = spec
    headers = {where: Header(tensors=some, data_start=0, metadata={}) for where, some in tensors.items()}
    inventory = inventory_of(headers)
    if opened.is_in_parts:
        inventory = Inventory({each.name: Tensor(each.dtype, each.shape) for each in opened.layout.tensors})
    return Structure(path="", files={}, headers=headers, inventory=inventory)


_UNLEARNED = (
    "it has not been seen yet how this model is loaded: from a GPU's memory it is taken after a load from files"
)
_ON_ANOTHER_GPU = "it is on another GPU, and the model's loader computes with some of it: that needs files"


class OfferedVersion(FullVersion):
    """A version in a trainer's memory: unchanged as long as it is offered, and `folder` is where its files will be.

    The model is on `device`, where it is on a GPU. Where `sliced` is a load plan, only what that copies was received:
    by no other way may it be loaded.
    """

    kind = "handover"
    says = "the offer"
    source: OfferedMemory

    def __init__(
        self,
        *,
        source: OfferedMemory,
        loading: Loading,
        imported: ImportedTensors,
        device: torch.device | None = None,
        sliced: ReplayPlan | None = None,
    ) -> None:
        super().__init__(source, Options(), loading)
        self.imported, self.device = imported, device
        self._sliced = sliced
        self._fits = False  # in this pause: the plan of what was made ready

    @property
    def expected(self) -> Mapping[str, str]:
        return self.source.offer.expected

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

    def write(self, call: UpdateCall) -> TensorFeed:
        """From here to the end of `check` the trainer waits."""
        feed = TensorFeed({}, fault="it could not be loaded")
        try:
            self._check_slices()
            with self.source.handle_cache.holding(self.source.opened):
                self.imported.hold()
                feed = self.loading.load(call, self._given(), partial=False, readied=self.readied)
        except (OfferRefusedError, SourceRefusedError) as error:
            feed.fault = str(error)
        finally:
            if feed.fault is not None:
                self._over()
        self._others = feed.others
        return feed

    def check(self, contents: dict[str, str]) -> str | None:
        """All that is only copied has the offer's fingerprints, and the trainer stands by it."""
        try:
            if not self.imported.is_exported:
                return "the trainer is gone, or took its tensors back while they were copied"
            return super().check(contents)
        finally:
            self._over()

    def put_back(self, call: UpdateCall, previous: ServedState | None, path: str) -> TensorFeed:
        self.source.handle_cache.close()  # what was opened may not be what the trainer has there now
        return super().put_back(call, previous, path)

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


def is_ours(path: str, root: Path | None) -> bool:
    """Whether a folder is a version, or a version's files may yet come here: a root's folder of that name, and nothing
    there.
    """
    folder = Path(path)
    return is_version(path, root) or (
        parse_version_folder(folder.name) is not None
        and not folder.exists()
        and any((above / SERVICE_FOLDER).is_dir() for above in folder.absolute().parents)
    )
