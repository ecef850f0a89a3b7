"""A version that several ranks of a trainer lend in parts: the load plan's copies cut along them, and whole tensors.

A plan's copy is of rows of a tensor, and a part is rows of its bytes. What both have in common is a copy from the
part's own memory, where its rows follow each other without gaps. A copy of more dimensions than two, or one that
turns a matrix, is made of the whole tensor, which is put together first.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from refitd_client.tensors import TORCH_NAMES
from refitd_client.transport.ipc.offer import HostPlace, OfferedTensor
from refitd_client.transport.ipc.offered_parts import piece_name, strips_of
from refitd_client.transport.shards.strips import Strip, common, strip
from refitd_plugin import driver
from refitd_plugin.copies import PlanCopy
from refitd_plugin.moves import move_of, rows_of

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
        """Take what an offer names.

        Args:
            tensors: its tensors by name.
            pieces: what lies in memory, by name.
            view: gives a view of one of these, where it lies on the current GPU or in host memory.
            addresses: where allocations begin.
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

    Args:
        copies: the plan's, from whole tensors.
        tensors: the offer's, by name.
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
        """Where an element lies."""
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

    def by_rows(self, each: Strip) -> Iterator[Strip]:
        """Elements that lie together in the tensor: the end of one row, those rows that are whole, and the begin of
        another one.
        """
        if self.rows == 1 or self.pitch != self.width:
            yield each  # it lies in one row
            return
        begin = each.begin
        if column := (begin - self.begin) % self.pitch:
            width = min(self.width - column, each.end - begin)
            yield Strip(begin, width, 1, width)
            begin += width
        if whole := (each.end - begin) // self.width:
            yield Strip(begin, self.width, whole, self.width)
            begin += whole * self.width
        if begin < each.end:
            yield Strip(begin, each.end - begin, 1, each.end - begin)


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
            for some in [each] if each.rows > 1 else target.by_rows(each):
                pitches = target.pitch_of(some), source.pitch_of(some)
                if None in pitches or len(found) == _MOST_PIECES:
                    return None
                name, shape = piece_name(tensor.name, number), (some.rows, some.width)
                there = copy.target.detach().as_strided(shape, (pitches[0] or 1, 1), target.at(some.begin))
                found.append(PlanCopy(name, source.at(some.begin), shape, (pitches[1] or 1, 1), there))
    return found


def _in_elements(tensor: OfferedTensor, item: int) -> Sequence[Strip]:
    """The parts of a tensor, in elements of so many bytes."""
    strips = strips_of(tensor.parts)
    return [strip(each.begin // item, each.width // item, each.rows, each.pitch // item) for each in strips]
