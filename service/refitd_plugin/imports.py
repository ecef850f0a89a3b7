"""What a rank has open of trainers' memory: opened once, and kept from one offer to the next.

What an offer says of places is mostly what the last one said. Then nothing is parsed, opened or compared again: a
thread beside SGLang's loop waits for the interpreter at every step, and a trainer waits for the thread.
"""

import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.transport.ipc import exporter, secret
from refitd_client.transport.ipc.device import DriverError
from refitd_client.transport.ipc.offer import Allocation as ExportedAllocation
from refitd_client.transport.ipc.offer import DevicePlace, Layout, Offer, OfferedTensor, OfferRefusedError
from refitd_client.transport.ipc.offer_file import ImportedTensors
from refitd_client.transport.ipc.taking import Taker
from refitd_plugin.source import SourceRefusedError

if TYPE_CHECKING:
    from refitd_client.validation.evidence import Structure
    from refitd_plugin.loading import Readied

_LOOK_SECONDS = 1.0  # between two looks whether a trainer is still there


@dataclass(frozen=True, slots=True)
class ImportedAllocation:
    """Memory of another process, as a file's would be: where it begins."""

    address: int


@dataclass(slots=True, eq=False)
class OpenedMemory:
    """The memory of one trainer that a layout names, and what was found out about it: its tensors as a folder's would
    be, with the digest of their `inventory`, once they were held against the model, and the copies of a hand-over, once
    they were made ready.
    """

    exporter: Path
    layout: Layout
    structure: "Structure | None" = None
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
    """One rank's. Memory is given back when the next offer does not name it, or soon after its trainer is gone: what
    somebody holds open is not free, and the next trainer may need it.
    """

    def __init__(self) -> None:
        self._taker, self._secret = Taker(), _Secret()
        self._turn = threading.RLock()
        self._opened: OpenedMemory | None = None
        self._offer: Offer | None = None
        self._watching = False

    def import_offer(self, root: Path, path: str) -> tuple[ImportedTensors, OpenedMemory]:
        """Read the offer at a path beneath the root, and take over what it names; the rest is given back.

        Raises:
            SourceRefusedError: it is none, or not for here. OSError: it is gone, or cannot be read.
        """
        with self._turn:
            try:
                imported = ImportedTensors(root / path, self._secret.of(root), self._offer)
                return imported, self._take_over(imported, (root / path).parent)
            except (OfferRefusedError, secret.SecretRefusedError) as error:
                raise SourceRefusedError(str(error)) from error

    def tensor(self, tensor: OfferedTensor) -> Any:
        """A view of a tensor that the last offer names.

        Raises:
            SourceRefusedError: it cannot be had here.
        """
        with self._turn, _refusing():
            return self._taker.tensor(tensor)

    def addresses(self, opened: OpenedMemory, device: int) -> dict[str, Any] | None:
        """The allocations that an offer names, seen from a GPU. None where one is in host memory.

        Raises:
            SourceRefusedError: they cannot be had here.
        """
        if len(opened.places) < sum(1 for tensor in opened.layout.tensors if tensor.nbytes):
            return None
        with self._turn, _refusing():
            found = self._taker.addresses(opened.ends, device)
        return {place.handle.hex(): ImportedAllocation(found[place.allocation]) for place in opened.places.values()}

    def close(self) -> None:
        """Give back all."""
        with self._turn:
            self._opened = self._offer = None
            self._taker.keep(None)

    @contextmanager
    def holding(self, opened: OpenedMemory) -> Generator[None]:
        """While this context lasts nothing is given back.

        Raises:
            SourceRefusedError: it was given back already.
        """
        with self._turn:
            if self._opened is not opened:
                raise SourceRefusedError("what the offer names is not what was looked at last")
            yield

    def _take_over(self, imported: ImportedTensors, folder: Path) -> OpenedMemory:
        """Known is what comes from the same process, which lives and has moved nothing."""
        opened, offer = self._opened, imported.offer
        if not imported.is_exported:
            raise SourceRefusedError("the offer was withdrawn, or its trainer is gone")
        if opened is None or opened.layout is not offer.layout or opened.exporter != folder:
            self._opened = self._offer = None
            self._taker.begin(offer.layout)
            opened = self._opened = OpenedMemory(folder, offer.layout)
            self._begin_watch()
        self._offer = offer
        return opened

    def _begin_watch(self) -> None:
        if not self._watching:
            self._watching = True
            threading.Thread(target=self._watch, name="refitd-ipc-watch", daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            with self._turn:
                if self._opened is not None and not exporter.is_there(self._opened.exporter):
                    self.close()


class _Secret:
    """A root's, read again when its file is another, or is changed in any way."""

    def __init__(self) -> None:
        self._seen: tuple[Any, ...] = ()
        self._read = b""

    def of(self, root: Path) -> bytes:
        """As `secret.read_secret`."""
        status = os.lstat(root / SERVICE_FOLDER / secret.NAME)
        seen = root, status.st_dev, status.st_ino, status.st_mode, status.st_ctime_ns
        if seen != self._seen:
            self._read, self._seen = secret.read_secret(root), seen
        return self._read


@contextmanager
def _refusing() -> Generator[None]:
    try:
        yield
    except (DriverError, OSError, ValueError) as error:
        raise SourceRefusedError(f"the trainer's memory cannot be read here: {error}") from error
