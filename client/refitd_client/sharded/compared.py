"""Which rank compares what, where a delta is looked for, and where its elements lie in the whole tensor. Pure.

As a rule a rank compares what it writes, so that each element is compared once, whichever ranks hold it. What is
redistributed before it is written is compared where it is: indices are translated, and no collective is needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

import numpy as np
from numpy.typing import NDArray

from refitd_client.delta.change import Indices, index_type
from refitd_client.fingerprint import Bits
from refitd_client.sharded.layout import (
    Box,
    BoxHolder,
    Claim,
    ShardedLayout,
    WholeTensor,
    WritePart,
    shared_out,
    tile,
)
from refitd_client.tensors import entry_of, refused


def compared_parts(claims: Sequence[Sequence[Claim]], layout: ShardedLayout) -> list[list[WritePart]]:
    """The parts that each rank compares: those that it writes, or of what is redistributed those that it holds.

    Args:
        claims: each rank's, by rank.
        layout: what was made of them.

    Raises:
        InvalidWeightsError: ranks hold a tensor in ways that do not fit each other before it is redistributed.
    """
    found: dict[str, list[tuple[int, Claim]]] = {}
    for rank, own in enumerate(claims):
        for claim in own:
            if claim.name in layout.locations:
                found.setdefault(claim.name, []).append((rank, claim))
    moved = {name: own for name, own in found.items() if any(claim.held is not None for _, claim in own)}
    parts = [[part for part in own if part.name not in moved] for own in layout.parts]
    wholes = [_as_held(name, own, len(claims)) for name, own in moved.items()]
    return [own + more for own, more in zip(parts, shared_out(wholes, len(claims)), strict=True)]


def _as_held(name: str, claims: Sequence[tuple[int, Claim]], ranks: int) -> WholeTensor:
    first = claims[0][1]
    holders: dict[Box, list[BoxHolder]] = {}
    for rank, claim in claims:
        for number, box in enumerate(claim.held_boxes):
            holders.setdefault(box, []).append(BoxHolder(rank, number))
    if not tile(holders, first.shape):
        raise refused(name, 'is sharded in several ways, by which it cannot be compared: publish with transport="disk"')
    entry = entry_of(name, first.dtype, first.shape)
    return WholeTensor(entry=entry, shape=first.shape, holders=holders, memories=(None,) * ranks, second=False)


@dataclass(frozen=True)
class IndexMap:
    """Where the elements `begin` to `end` of a box, counted from `begin`, lie in the whole tensor of a `shape`.

    Row-major order in the box is that in the tensor: what is in strict order here is in strict order there.
    """

    box: Box
    shape: tuple[int, ...]
    begin: int
    end: int

    @cached_property
    def _sides(self) -> list[tuple[int, int, int]]:
        """Start, size and whole size along each dimension, the innermost first. Those that lie together are one."""
        sides = [(0, 1, 1)]
        each = zip(reversed(self.box.start), reversed(self.box.shape), reversed(self.shape), strict=True)
        for start, size, full in each:
            _, inner, whole = sides[-1]
            if inner == whole:
                sides[-1] = start * whole, size * whole, full * whole
            else:
                sides.append((start, size, full))
        return sides

    @property
    def kind(self) -> type[np.uint32] | type[np.uint64]:
        """The type of indices in the whole tensor."""
        return index_type(prod(self.shape))

    def to_whole(self, at: Indices, out: Indices) -> None:
        """Translate indices of the part into those of the whole tensor.

        Args:
            at: the part's.
            out: where they go, an array of `kind`.
        """
        sides = self._sides
        if len(sides) == 1:
            np.add(at, self.begin + sides[0][0], out=out, dtype=out.dtype, casting="unsafe")
            return
        rest, found, stride = at.astype(np.uint64) + np.uint64(self.begin), np.zeros(len(at), np.uint64), 1
        for number, (start, size, full) in enumerate(sides):
            index = rest
            if number < len(sides) - 1:
                outer = rest // np.uint64(size)
                index, rest = rest - outer * np.uint64(size), outer
            found += (index + np.uint64(start)) * np.uint64(stride)
            stride *= full
        out[:] = found

    def to_part(self, at: Indices) -> tuple[NDArray[np.bool_], Indices]:
        """Which of some indices of the whole tensor lie in the part, and where there."""
        rest, local, stride = at.astype(np.uint64), np.zeros(len(at), np.uint64), 1
        inside = np.ones(len(at), np.bool_)
        sides = self._sides
        for number, (start, size, full) in enumerate(sides):
            index = rest
            if number < len(sides) - 1:
                outer = rest // np.uint64(full)
                index, rest = rest - outer * np.uint64(full), outer
            inside &= (index >= np.uint64(start)) & (index < np.uint64(start + size))
            local += (index - np.uint64(start)) * np.uint64(stride)  # wraps round where it is outside
            stride *= size
        inside &= (local >= np.uint64(self.begin)) & (local < np.uint64(self.end))
        return inside, local[inside] - np.uint64(self.begin)


def join(pieces: Sequence[tuple[Indices, Bits]], indices: Indices, values: Bits) -> None:
    """Put the pieces of one tensor together, in strict order.

    Args:
        pieces: indices and bits. Each is in strict order, and no two have an index in common.
        indices: where all indices go.
        values: where all bits go.
    """
    ordered = sorted((piece for piece in pieces if len(piece[0])), key=lambda piece: int(piece[0][0]))
    np.concatenate([piece[0] for piece in ordered], out=indices)
    np.concatenate([piece[1] for piece in ordered], out=values)
    follow = all(one[0][-1] < other[0][0] for one, other in pairwise(ordered))
    if not follow:
        order = np.argsort(indices, kind="stable")  # stable: it merges runs that are in order already
        indices[:], values[:] = indices[order], values[order]
