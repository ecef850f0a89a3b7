"""The memory of trainers that a rank has open.

Memory is opened once, and kept from one offer to the next. An offer mostly names the same places as the last one. Then
nothing is parsed, opened or compared again: a thread beside SGLang's loop waits for the interpreter at every step, and
a trainer waits for the thread.
"""

import os
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refitd_client.contract.naming import SERVICE_FOLDER
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
from refitd_plugin.lent_parts import ImportedAllocation
from refitd_plugin.registered import Registry
from refitd_plugin.source import SourceRefusedError

if TYPE_CHECKING:
    from refitd_plugin.loading import Readied


_LENDER_LOOK_SECONDS = 1.0  # between two looks whether a trainer is still there


@dataclass(eq=False)
class OpenedMemory:
    """The memory of one trainer that a layout names.

    `structure` has its tensors as a folder's would be, with the digest of their `inventory`, once they were held
    against the model, and `pairs` its output layers that have to be copies of embeddings, and those; `readied` are the
    copies of a hand-over, once they were made ready. `pieces` are what lies in memory: the tensors, or their parts.
    """

    exporter: Path
    layout: OfferLayout
    structure: Structure | None = None
    inventory: str = ""
    pairs: Mapping[str, str] = field(default_factory=dict[str, str])
    readied: "Readied | None" = None
    pieces: dict[str, OfferedTensor] = field(init=False)
    places: dict[str, DevicePlace] = field(init=False)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.pieces = {piece.name: piece for piece in self.layout.pieces}
        self.nbytes = sum(piece.nbytes for piece in self.pieces.values())
        self.places = {
            name: piece.place
            for name, piece in self.pieces.items()
            if piece.nbytes and isinstance(piece.place, DevicePlace)
        }

    @property
    def is_there(self) -> bool:
        """Whether the trainer lives, with all its ranks."""
        return exporter.is_there(self.exporter, (exporter.NAME, *self.layout.locks))

    @cached_property
    def tensors(self) -> dict[str, OfferedTensor]:
        """The layout's tensors by name."""
        return {tensor.name: tensor for tensor in self.layout.tensors}

    @cached_property
    def is_in_parts(self) -> bool:
        """Whether ranks of a trainer have parts of it."""
        return any(tensor.parts for tensor in self.layout.tensors)

    @property
    def ends(self) -> dict[ExportedAllocation, int]:
        """How many bytes of each allocation the tensors use."""
        found: dict[ExportedAllocation, int] = {}
        for name, place in self.places.items():
            found[place.allocation] = max(found.get(place.allocation, 0), place.offset + self.pieces[name].nbytes)
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
        if len(opened.places) < sum(1 for piece in opened.pieces.values() if piece.nbytes):
            return None
        with self._turn, _refusing():
            found = self._taker.addresses(opened.ends, device)
        return {place.handle.hex(): ImportedAllocation(found[place.allocation]) for place in opened.places.values()}

    def _files(self, opened: OpenedMemory, device: int) -> dict[str, Any] | None:
        """The files of a layout, registered with the driver the first time."""
        places = (piece.place for piece in opened.pieces.values() if piece.nbytes)
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
            time.sleep(_LENDER_LOOK_SECONDS)
            with self._turn:
                if self._opened is not None and not self._opened.is_there:
                    self.close()


class _Secret:
    """A root's secret, read again when its file is another one, or was changed in any way."""

    def __init__(self) -> None:
        self._seen: tuple[Any, ...] = ()
        self._read = b""

    def of(self, root: Path) -> bytes:
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
