"""A version in a trainer's memory, as one on disk would be: its allocations are its files."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import xxhash

from refitd_client.checkpoint.inventory import Reference, compare, inventory_of, listed
from refitd_client.checkpoint.strict_header import Header, TensorSpec
from refitd_client.contract.naming import parse_version_id, version_folder
from refitd_client.transport.ipc.offer import HostPlace, Layout, Offer
from refitd_client.validation.evidence import Structure
from refitd_plugin import driver
from refitd_plugin.imports import IpcHandleCache, OpenedMemory
from refitd_plugin.served import ServedState
from refitd_plugin.source import SourceRefusedError, VersionPlace, VersionSource, is_version, mapped

if TYPE_CHECKING:
    from refitd_plugin.copy_schedule import Order


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedMemory(VersionSource):
    """What `VersionSource` is of files, of a trainer's memory. A loader is given copies of what it has to be `loaded`
    with: it may work in place on what it is given, and a GPU's memory is the trainer's own.
    """

    offer: Offer
    opened: OpenedMemory
    handle_cache: IpcHandleCache
    loaded: frozenset[str] = frozenset()

    @property
    def digest(self) -> str:
        """Of all that the offer says."""
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
        """Nothing of it may be read once the offer is over: whoever wants it again goes to the version's files."""
        return False

    @property
    def order(self) -> "Order":
        """As `VersionSource`."""
        return driver.between_devices

    def registered(self, registry: Any, device: int) -> dict[str, Any] | None:
        """Where each allocation is seen from a GPU; None where one is not on a GPU."""
        return self.handle_cache.addresses(self.opened, device)

    def tensors(self) -> dict[str, Any]:
        """Views of the tensors, and copies of those that are `loaded`."""
        views = {tensor.name: self.handle_cache.tensor(tensor) for tensor in self.opened.layout.tensors}
        return views | {name: views[name].clone() for name in self.loaded}


def memory_of(
    place: VersionPlace,
    offer: Offer,
    opened: OpenedMemory,
    handle_cache: IpcHandleCache,
    reference: Callable[[], Reference],
    *,
    on_device: bool,
) -> OfferedMemory:
    """What is offered for `place`, held against the model the first time that it lies so.

    Raises:
        SourceRefusedError: it is of another version, or not for this model.
    """
    parsed = parse_version_id(offer.version)
    if parsed is None or place.path != f"{parsed[0]}/{version_folder(parsed[1])}":
        raise SourceRefusedError(f"the offer is of {offer.version}, whose files will not be at {place.path}")
    if opened.structure is None:
        opened.structure = _fitting(opened, reference(), on_device=on_device)
        opened.inventory = opened.structure.inventory.digest
    hasher = xxhash.xxh3_128(offer.line)
    hasher.update(f"{offer.version}\n{offer.fingerprints}".encode())
    structure = replace(opened.structure, path=place.path, signature=f"offer:{hasher.hexdigest()}")
    return OfferedMemory(
        place=place,
        structure=structure,
        inventory=opened.inventory,
        maps={},
        offer=offer,
        opened=opened,
        handle_cache=handle_cache,
    )


def with_files(served_state: ServedState) -> ServedState | None:
    """What came from memory, made of its files; None where they are not there: it cannot be put back.

    Raises:
        SourceRefusedError, OSError: they are there, and cannot be opened.
    """
    if not is_version(str(served_state.source.place.folder)):
        return None
    return replace(served_state, source=mapped(served_state.source.place))


def _fitting(opened: OpenedMemory, reference: Reference, *, on_device: bool) -> Structure:
    if opened.is_on_device and not on_device:
        raise SourceRefusedError("the trainer's tensors are on a GPU, and this model is not")
    structure = structure_of(opened.layout)
    if differences := compare(structure.inventory, reference.inventory, tied=reference.tied):
        raise SourceRefusedError(f"the offer does not fit the model: {listed(differences)}")
    return structure


def structure_of(layout: Layout) -> Structure:
    """What a look at files would tell that lie so."""
    tensors: dict[str, dict[str, TensorSpec]] = {}
    for each in layout.tensors:
        where = each.place.path if isinstance(each.place, HostPlace) else each.place.handle.hex()
        spec = TensorSpec(each.dtype, each.shape, each.place.offset, each.place.offset + each.nbytes)
        tensors.setdefault(where, {})[each.name] = spec
    headers = {where: Header(tensors=some, data_start=0, metadata={}) for where, some in tensors.items()}
    return Structure(path="", files={}, headers=headers, inventory=inventory_of(headers))
