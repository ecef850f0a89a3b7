"""A version in a trainer's memory, as a source of loads: its allocations are its files.

Where ranks of a trainer lend parts of it, the parts are what its files have (`lent_parts`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from refitd_client.checkpoint.inventory import Inventory, Reference, Tensor, compare, inventory_of, listed, not_a_copy
from refitd_client.checkpoint.strict_header import Header, TensorSpec
from refitd_client.contract.naming import parse_version_id, version_folder
from refitd_client.transport.ipc.offer import HostPlace, Offer
from refitd_client.validation.validate import Structure
from refitd_plugin.imported import IpcHandleCache, OpenedMemory
from refitd_plugin.lent_parts import LentPieces, cut_copies
from refitd_plugin.served import ServedState
from refitd_plugin.source import SourceRefusedError, VersionPlace, VersionSource, is_version, mapped

if TYPE_CHECKING:
    from refitd_plugin.copies import PlanCopy


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
        """The digest of all that the offer says."""
        return self.structure.signature

    @property
    def label(self) -> str:
        """The id of the version."""
        return self.offer.version

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors."""
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
    """What is offered for `place`, held against the model the first time that this memory is offered.

    Args:
        place: where the version's files will be.
        offer: names the version.
        announced: the trainer's own offer, the same for all ranks.
        opened: the memory that the offer names.
        handle_cache: has that memory open.
        reference: describes the model.
        on_device: whether the model is on a GPU.

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
        opened.structure, opened.inventory = structure, structure.inventory.digest
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
        inventory=opened.inventory,
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
