"""The memory of trainers that a rank has open, and a version in it: to the rank its allocations are its files.

Memory is opened once, and kept from one offer to the next. An offer mostly names the same places as the last one. Then
nothing is parsed, opened or compared again: a thread beside SGLang's loop waits for the interpreter at every step, and
a trainer waits for the thread.
"""

import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from refitd_client.checkpoint.inventory import Reference, compare, inventory_of, listed
from refitd_client.checkpoint.strict_header import Header, TensorSpec
from refitd_client.contract.naming import SERVICE_FOLDER, parse_version_id, version_folder
from refitd_client.files.plain_file import open_plain
from refitd_client.transport.ipc import exporter, offer_file
from refitd_client.transport.ipc.device import DriverError
from refitd_client.transport.ipc.exported_memory import ImportedMemory
from refitd_client.transport.ipc.offer import Allocation as ExportedAllocation
from refitd_client.transport.ipc.offer import (
    DevicePlace,
    HostPlace,
    Offer,
    OfferedTensor,
    OfferLayout,
    OfferRefusedError,
)
from refitd_client.transport.ipc.offer_file import ImportedTensors
from refitd_client.validation.validate import Structure
from refitd_plugin import driver
from refitd_plugin.registered import Registry
from refitd_plugin.served import ServedState
from refitd_plugin.source import SourceRefusedError, VersionPlace, VersionSource, is_version, mapped

if TYPE_CHECKING:
    from refitd_plugin.copy_schedule import Order
    from refitd_plugin.loading import Readied


_LOOK_SECONDS = 1.0  # between two looks whether a trainer is still there


@dataclass(frozen=True, slots=True)
class ImportedAllocation:
    """Memory of another process, as a file's would be: where it begins."""

    address: int


@dataclass(slots=True, eq=False)
class OpenedMemory:
    """The memory of one trainer that a layout names.

    `structure` has its tensors as a folder's would be, with the digest of their `inventory`, once they were held
    against the model; `readied` are the copies of a hand-over, once they were made ready.
    """

    exporter: Path
    layout: OfferLayout
    structure: Structure | None = None
    inventory: str = ""
    readied: "Readied | None" = None
    places: dict[str, DevicePlace] = field(init=False)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(tensor.nbytes for tensor in self.layout.tensors)
        self.places = {
            tensor.name: tensor.place
            for tensor in self.layout.tensors
            if tensor.nbytes and isinstance(tensor.place, DevicePlace)
        }

    @property
    def ends(self) -> dict[ExportedAllocation, int]:
        """How many bytes of each allocation the tensors use."""
        found: dict[ExportedAllocation, int] = {}
        for tensor in self.layout.tensors:
            if (place := self.places.get(tensor.name)) is not None:
                found[place.allocation] = max(found.get(place.allocation, 0), place.offset + tensor.nbytes)
        return found

    @property
    def is_on_device(self) -> bool:
        """Whether any of it is a GPU's."""
        return bool(self.places)


class IpcHandleCache:
    """The memory that one rank has open. It is closed when the next offer does not name it, or soon after its trainer
    is gone: memory that a process holds open is not free, and the next trainer may need it.
    """

    def __init__(self) -> None:
        self._taker, self._secret = ImportedMemory(), _Secret()
        self._registry = Registry()
        self._turn = threading.RLock()
        self._opened: OpenedMemory | None = None
        self._offer: Offer | None = None
        self._announced: Offer | None = None
        self._watching = False

    def import_offer(self, root: Path, path: str) -> tuple[ImportedTensors, OpenedMemory]:
        """Read the offer at a path beneath the root, and open what it names; the rest is closed.

        Raises:
            SourceRefusedError: it is none, or not for here. OSError: it is gone, or cannot be read.
        """
        with self._turn:
            try:
                imported = ImportedTensors(root / path, self._secret.of(root), self._offer)
                return imported, self._take_over(imported, (root / path).parent)
            except (OfferRefusedError, offer_file.HandoverKeyRefusedError) as error:
                raise SourceRefusedError(str(error)) from error

    def announced(self, root: Path, path: str) -> Offer:
        """Read the offer at a path beneath the root, and open nothing.

        Raises:
            SourceRefusedError: it is none. OSError: it is gone, or cannot be read.
        """
        with self._turn:
            try:
                imported = ImportedTensors(root / path, self._secret.of(root), self._announced)
            except (OfferRefusedError, offer_file.HandoverKeyRefusedError) as error:
                raise SourceRefusedError(str(error)) from error
            imported.close()
            self._announced = imported.offer
            return imported.offer

    def tensor(self, tensor: OfferedTensor) -> Any:
        """A view of a tensor that the last offer names.

        Raises:
            SourceRefusedError: it cannot be opened here.
        """
        with self._turn, _refusing():
            return self._taker.tensor(tensor)

    def addresses(self, opened: OpenedMemory, device: int) -> dict[str, Any] | None:
        """What an offer names, seen from a GPU: allocations by their handles, files of shared memory by their paths.
        None where a GPU cannot read it where it is.

        Raises:
            SourceRefusedError: it cannot be opened here.
        """
        if not opened.is_on_device:
            return self._files(opened, device)
        if len(opened.places) < sum(1 for tensor in opened.layout.tensors if tensor.nbytes):
            return None
        with self._turn, _refusing():
            found = self._taker.addresses(opened.ends, device)
        return {place.handle.hex(): ImportedAllocation(found[place.allocation]) for place in opened.places.values()}

    def _files(self, opened: OpenedMemory, device: int) -> dict[str, Any] | None:
        """The files of a layout, registered with the driver the first time."""
        places = (tensor.place for tensor in opened.layout.tensors if tensor.nbytes)
        paths = {place.path for place in places if isinstance(place, HostPlace)}
        found: dict[str, Any] = {}
        with self._turn, _refusing():
            for path in paths:
                fd = open_plain(Path(path))
                try:
                    file = self._registry.of(fd, device)
                finally:
                    os.close(fd)
                if file is None:
                    return None
                found[path] = file
        return found

    def close(self) -> None:
        """Close all memory."""
        with self._turn:
            self._forget()
            self._taker.keep(None)

    def _forget(self) -> None:
        if self._opened is not None:
            self._opened.readied = None  # it refers to files that are registered
        self._opened = self._offer = None
        self._registry = Registry()  # a file is registered for as long as something refers to it

    @contextmanager
    def holding(self, opened: OpenedMemory) -> Generator[None]:
        """While this context lasts nothing is closed.

        Raises:
            SourceRefusedError: it was closed already.
        """
        with self._turn:
            if self._opened is not opened:
                raise SourceRefusedError("what the offer names is not what was looked at last")
            yield

    def _take_over(self, imported: ImportedTensors, folder: Path) -> OpenedMemory:
        """The memory of an offer: what is open already, if the same process lives and has moved nothing."""
        opened, offer = self._opened, imported.offer
        if not imported.is_exported:
            raise SourceRefusedError("the offer was withdrawn, or its trainer is gone")
        if opened is None or opened.layout is not offer.layout or opened.exporter != folder:
            self._forget()
            self._taker.begin(offer.layout)
            opened = self._opened = OpenedMemory(folder, offer.layout)
            if not self._watching:
                self._watching = True
                threading.Thread(target=self._watch, name="refitd-ipc-watch", daemon=True).start()
        self._offer = offer
        return opened

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            with self._turn:
                if self._opened is not None and not exporter.is_there(self._opened.exporter):
                    self.close()


class _Secret:
    """A root's secret, read again when its file is another one, or was changed in any way."""

    def __init__(self) -> None:
        self._seen: tuple[Any, ...] = ()
        self._read = b""

    def of(self, root: Path) -> bytes:
        """As `offer_file.read_secret`."""
        status = os.lstat(root / SERVICE_FOLDER / offer_file.NAME)
        seen = root, status.st_dev, status.st_ino, status.st_mode, status.st_ctime_ns
        if seen != self._seen:
            self._read, self._seen = offer_file.read_secret(root), seen
        return self._read


@contextmanager
def _refusing() -> Generator[None]:
    try:
        yield
    except (DriverError, OSError, ValueError) as error:
        raise SourceRefusedError(f"the trainer's memory cannot be read here: {error}") from error


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
    def order(self) -> "Order":
        """As `VersionSource`."""
        return driver.between_devices if self.opened.is_on_device else driver.to_device

    def registered(self, registry: Any, device: int) -> dict[str, Any] | None:
        """The address of each allocation or file, seen from a GPU; None where it cannot be read there."""
        return self.handle_cache.addresses(self.opened, device)

    def tensors(self) -> dict[str, Any]:
        """Views of the tensors, and copies of those that are `loaded`."""
        views = {tensor.name: self.handle_cache.tensor(tensor) for tensor in self.opened.layout.tensors}
        return views | {name: views[name].clone() for name in self.loaded}


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
        structure, model = structure_of(opened.layout), reference()
        if differences := compare(structure.inventory, model.inventory, tied=model.tied):
            raise SourceRefusedError(f"the offer does not fit the model: {listed(differences)}")
        opened.structure, opened.inventory = structure, structure.inventory.digest
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
    if not is_version(str(served_state.source.place.folder)):
        return None
    return replace(served_state, source=mapped(served_state.source.place))


def structure_of(layout: OfferLayout) -> Structure:
    """What a look at files with this layout would find."""
    tensors: dict[str, dict[str, TensorSpec]] = {}
    for each in layout.tensors:
        where = each.place.path if isinstance(each.place, HostPlace) else each.place.handle.hex()
        spec = TensorSpec(each.dtype, each.shape, each.place.offset, each.place.offset + each.nbytes)
        tensors.setdefault(where, {})[each.name] = spec
    headers = {where: Header(tensors=some, data_start=0, metadata={}) for where, some in tensors.items()}
    return Structure(path="", files={}, headers=headers, inventory=inventory_of(headers))
