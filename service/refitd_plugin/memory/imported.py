"""The memory of trainers that a rank has open, also a version that several ranks of a trainer lend in parts.

Memory is opened once, and kept from one offer to the next. An offer mostly names the same places as the last one. Then
nothing is parsed, opened or compared again: a thread beside SGLang's loop waits for the interpreter at every step, and
a trainer waits for the thread.

Of a version in parts the load plan's copies are cut along the parts. A plan's copy is of rows of a tensor, and a part
is rows of its bytes. What both have in common is a copy from the part's own memory, where its rows follow each other
without gaps. A copy of more dimensions than two, or one that turns a matrix, is made of the whole tensor, which is put
together first.
"""

import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from refitd_client.files.plain_file import open_plain
from refitd_client.tensors import TORCH_NAMES
from refitd_client.transport import exporter, offer_file
from refitd_client.transport.device import DriverError
from refitd_client.transport.memory import ImportedMemory
from refitd_client.transport.offer import Allocation as ExportedAllocation
from refitd_client.transport.offer import (
    DevicePlace,
    HostPlace,
    Offer,
    OfferedTensor,
    OfferLayout,
    OfferRefusedError,
    piece_name,
    strips_of,
)
from refitd_client.transport.offer_file import ImportedTensors
from refitd_client.transport.schedule import Strip, common, strip
from refitd_client.validation.validate import Structure
from refitd_plugin.memory import driver
from refitd_plugin.memory.driver import Registry
from refitd_plugin.memory.source import SourceRefusedError
from refitd_plugin.memory.spans import move_of, rows_of
from refitd_plugin.update.recorder import PlanCopy

if TYPE_CHECKING:
    from refitd_plugin.update.loading import Readied


_MOST_PIECES = 4096  # of one copy: one that would be cut into more is made of the whole tensor


@dataclass(frozen=True, slots=True)
class ImportedAllocation:
    """Memory of another process, as a file's would be: where it begins."""

    address: int


class LentPieces(Mapping[str, torch.Tensor]):
    """Pieces by name, and whole tensors, each put together when it is asked for. What is not asked for takes no memory.

    `addresses` are those of the allocations, by handle, as the current GPU sees them; none where all lies in host
    memory.
    """

    def __init__(
        self,
        tensors: Mapping[str, OfferedTensor],
        pieces: Mapping[str, OfferedTensor],
        view: Callable[[OfferedTensor], torch.Tensor],
        addresses: Mapping[str, ImportedAllocation],
    ) -> None:
        """Take what an offer names. `view`: gives a view of one of these, where it lies on the current GPU or in host
        memory. `addresses`: where allocations begin.
        """
        self._tensors, self._pieces, self._view, self._addresses = tensors, pieces, view, addresses

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._tensors:
            return self._together(self._tensors[name])
        return self._view(self._pieces[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def _together(self, tensor: OfferedTensor) -> torch.Tensor:
        if not tensor.parts:
            return self._view(tensor).clone()
        kind = getattr(torch, TORCH_NAMES[tensor.dtype])
        whole = torch.empty(tensor.shape, dtype=kind, device="cuda" if self._addresses else "cpu")
        for copy in copies_together(tensor, whole):
            piece = self._pieces[copy.name]
            if isinstance(piece.place, HostPlace):
                copy.target.copy_(copy.source({copy.name: self._view(piece)}))
            elif move := move_of(copy.target, copy.strides, piece.place.offset):
                above = self._addresses[piece.place.handle.hex()].address
                driver.between_devices(move, above, torch.cuda.current_stream().cuda_stream)
        return whole


def cut_copies(copies: Iterable[PlanCopy], tensors: Mapping[str, OfferedTensor]) -> list[PlanCopy]:
    """A plan's copies from what lies in memory: their names are those of pieces, or of tensors that are wanted whole.
    `copies`: the plan's, from whole tensors.
    """
    found: list[PlanCopy] = []
    for copy in copies:
        tensor = tensors[copy.name]
        pieces = _cut(copy, tensor) if tensor.parts else None
        found += [copy] if pieces is None else pieces
    return found


def copies_together(tensor: OfferedTensor, whole: torch.Tensor) -> list[PlanCopy]:
    """The copies that put a tensor together from its pieces. `whole` has its dtype and shape, and lies without gaps."""
    item, flat = whole.element_size(), whole.view(-1)
    return [
        PlanCopy(
            piece_name(tensor.name, number),
            0,
            (each.rows, each.width),
            (each.width, 1),
            flat.as_strided((each.rows, each.width), (each.pitch, 1), flat.storage_offset() + each.begin),
        )
        for number, each in enumerate(_in_elements(tensor, item))
    ]


@dataclass(frozen=True, slots=True)
class _Side:
    """Rows of a tensor's elements, and where they lie in memory: there `step` elements apart, from `place` on.

    In the tensor they begin at element `begin`, have `width` elements, and are `pitch` elements apart.
    """

    begin: int
    width: int
    rows: int
    pitch: int
    place: int
    step: int

    def at(self, element: int) -> int:
        row, column = divmod(element - self.begin, self.pitch) if self.rows > 1 else (0, element - self.begin)
        return self.place + row * self.step + column

    def pitch_of(self, each: Strip) -> int | None:
        """How far apart rows of elements lie that it has; None where that is not the same for all, or one lies in
        pieces.
        """
        first, last = divmod(each.begin - self.begin, self.pitch), (each.end - 1 - self.begin) // self.pitch
        if self.rows == 1 or first[0] == last:
            return each.pitch
        if each.pitch % self.pitch or first[1] + each.width > self.width:
            return None
        return each.pitch // self.pitch * self.step


def _cut(copy: PlanCopy, tensor: OfferedTensor) -> list[PlanCopy] | None:
    """A copy as copies from pieces; None where it takes the whole tensor."""
    if not copy.target.numel():
        return []
    rows = rows_of(copy.shape, copy.strides, copy.target.stride())
    if rows is None or (rows.source_column, rows.target_column) != (1, 1) or rows.source_row < rows.columns:
        return None
    begin = int(copy.target.storage_offset())
    target = _Side(copy.offset, rows.columns, rows.rows, rows.source_row, begin, rows.target_row)
    taken, found = strip(copy.offset, rows.columns, rows.rows, rows.source_row), list[PlanCopy]()
    for number, part in enumerate(_in_elements(tensor, copy.target.element_size())):
        source = _Side(part.begin, part.width, part.rows, part.pitch, 0, part.width)
        for each in common(taken, part):
            pitches = target.pitch_of(each), source.pitch_of(each)
            if None in pitches or len(found) == _MOST_PIECES:
                return None
            name, shape = piece_name(tensor.name, number), (each.rows, each.width)
            there = copy.target.detach().as_strided(shape, (pitches[0] or 1, 1), target.at(each.begin))
            found.append(PlanCopy(name, source.at(each.begin), shape, (pitches[1] or 1, 1), there))
    return found


def _in_elements(tensor: OfferedTensor, item: int) -> Sequence[Strip]:
    strips = strips_of(tensor.parts)
    return [strip(each.begin // item, each.width // item, each.rows, each.pitch // item) for each in strips]


_LENDER_LOOK_SECONDS = 1.0  # between two looks whether a trainer is still there


@dataclass(eq=False)
class OpenedMemory:
    """The memory of one trainer that a layout names.

    `structure` has its tensors as a folder's would be, once they were held against the model, and `pairs` its output
    layers that have to be copies of embeddings, and those; `readied` are the copies of a hand-over, once they were made
    ready. `pieces` are what lies in memory: the tensors, or their parts.
    """

    exporter: Path
    layout: OfferLayout
    structure: Structure | None = None
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
        return exporter.is_there(self.exporter, (exporter.NAME, *self.layout.locks))

    @cached_property
    def tensors(self) -> dict[str, OfferedTensor]:
        return {tensor.name: tensor for tensor in self.layout.tensors}

    @cached_property
    def is_in_parts(self) -> bool:
        return any(tensor.parts for tensor in self.layout.tensors)

    @property
    def ends(self) -> dict[ExportedAllocation, int]:
        found: dict[ExportedAllocation, int] = {}
        for name, place in self.places.items():
            found[place.allocation] = max(found.get(place.allocation, 0), place.offset + self.pieces[name].nbytes)
        return found

    @property
    def is_on_device(self) -> bool:
        return bool(self.places)


class IpcHandleCache:
    """The memory that one rank has open. It is closed when the next offer does not name it, or soon after its trainer
    is gone: memory that a process holds open is not free, and the next trainer may need it.
    """

    def __init__(self) -> None:
        self._taker = ImportedMemory()
        self._registry = Registry()
        self._turn = threading.RLock()
        self._opened: OpenedMemory | None = None
        self._known: list[tuple[Path, Offer]] = []  # by folder: a trainer's last, and that of this rank's receiver
        self._watching = False

    def import_offer(self, root: Path, path: str) -> tuple[ImportedTensors, OpenedMemory]:
        """Read the offer at a path beneath the root, and open what it names; the rest is closed.

        Raises:
            SourceRefusedError: it is none, or not for here. OSError: it is gone, or cannot be read.
        """
        with self._turn, _refusing_offers():
            imported = self._read(root, path)
            return imported, self._take_over(imported, (root / path).parent)

    def announced(self, root: Path, path: str) -> Offer:
        """Read the offer at a path beneath the root, and open nothing. Raises as `import_offer`."""
        with self._turn, _refusing_offers():
            imported = self._read(root, path)
            imported.close()
            return imported.offer

    def _read(self, root: Path, path: str) -> ImportedTensors:
        """Read an offer. One that names the same places as the last one in its folder is not parsed again."""
        folder = (root / path).parent
        known = next((offer for other, offer in self._known if other == folder), None)
        imported = ImportedTensors(root / path, offer_file.read_secret(root), known)
        self._known = [(folder, imported.offer), *(each for each in self._known if each[0] != folder)][:2]
        return imported

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
        with self._turn:
            self._forget()
            self._taker.keep(None)

    def _forget(self) -> None:
        if self._opened is not None:
            self._opened.readied = None  # it refers to files that are registered
        self._opened = None
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
        return opened

    def _watch(self) -> None:
        while True:
            time.sleep(_LENDER_LOOK_SECONDS)
            with self._turn:
                if self._opened is not None and not self._opened.is_there:
                    self.close()


@contextmanager
def _refusing_offers() -> Generator[None]:
    try:
        yield
    except (OfferRefusedError, offer_file.HandoverKeyRefusedError) as error:
        raise SourceRefusedError(str(error)) from error


@contextmanager
def _refusing() -> Generator[None]:
    try:
        yield
    except (DriverError, OSError, ValueError) as error:
        raise SourceRefusedError(f"the trainer's memory cannot be read here: {error}") from error
