"""One rank's copy of the parts that it compares, from one version to the next.

As a rule a rank compares what it writes, so that each element is compared once, whichever ranks hold it. What is
redistributed before it is written is compared where it is: indices are translated, and no collective is needed.

A part is compared as a tensor of its own, by the same shadows as one process has (`delta/shadow.py`). A GPU says what
changed by the whole tensor's indices, and what that adds to its fingerprint. Both is computed here of parts in host
memory.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from math import prod
from threading import Event
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from refitd_client.checkpoint.finite import rule_of
from refitd_client.delta.change import MANY_CHANGES, DeltaRules, Indices, elements_of, in_a_row, index_type
from refitd_client.delta.shadow import ChangedElements, ShadowDiff, Shadows
from refitd_client.errors import PublishError
from refitd_client.fingerprint import Bits, width_of
from refitd_client.fingerprint.host import MASK, shifts_of
from refitd_client.fingerprint.tensors import CASTS_BYTES, PartInput, PartPlace, part_scans
from refitd_client.lanes import in_lanes, lanes_for
from refitd_client.sharded.holdings import Holding
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
from refitd_client.sharded.orders import (
    ChangesReply,
    CompareOrder,
    GatherOrder,
    KeepOrder,
    PackedChanges,
    ShadowOrder,
)
from refitd_client.sharded.parts import SentPart, flat_box, sent_parts
from refitd_client.tensors import Casts, TensorSource, entry_of, refused, torch_source
from refitd_client.write.plan import changes_not_finite


def compared_parts(claims: Sequence[Sequence[Claim]], layout: ShardedLayout) -> list[list[WritePart]]:
    """The parts that each rank compares: those that it writes, or of what is redistributed those that it holds.

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
        return index_type(prod(self.shape))

    def to_whole(self, at: Indices, out: Indices) -> None:
        """Translate indices of the part into those of the whole tensor.

        Args:
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
    """
    ordered = sorted((piece for piece in pieces if len(piece[0])), key=lambda piece: int(piece[0][0]))
    np.concatenate([piece[0] for piece in ordered], out=indices)
    np.concatenate([piece[1] for piece in ordered], out=values)
    follow = all(one[0][-1] < other[0][0] for one, other in pairwise(ordered))
    if not follow:
        order = np.argsort(indices, kind="stable")  # stable: it merges runs that are in order already
        indices[:], values[:] = indices[order], values[order]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPart:
    """A part of a tensor, and where its elements lie in the whole one."""

    sent: SentPart
    map: IndexMap

    @property
    def name(self) -> str:
        return self.sent.entry.name


class RankShadow:
    """The copy, and the number that rank 0 gave it: 0 where there is none. `rules` are this rank's word on deltas."""

    def __init__(self, rules: DeltaRules, *, stream: bool, check_finite: bool) -> None:
        self.rules = rules
        self._number = 0
        self._stream = stream
        self._check_finite = check_finite
        self._parts: list[ComparedPart] = []
        self._shadows: Shadows | None = None
        self._sums: dict[str, int] = {}
        self._devices: dict[str, str] = {}
        self._sources: list[TensorSource] = []

    def number_of(self, holdings: Mapping[str, Holding]) -> int:
        """The copy's number, if these tensors are on the devices that the copied ones were on; else 0."""
        return self._number if self._number and _devices(holdings) == self._devices else 0

    def keep_only(self, number: int) -> None:
        """Drop the copy unless it has this number: what rank 0 does not know any more is of no use."""
        if number != self._number:
            self.drop()

    def drop(self) -> None:
        if self._shadows is not None:
            self._shadows.close()
        self._number, self._shadows, self._parts, self._sums = 0, None, [], {}

    def release(self) -> None:
        """Release the trainer's tensors."""
        for source in self._sources:
            if source.held is not None:
                source.held.value = None
        self._sources = []

    def answer(self, order: ShadowOrder, holdings: Mapping[str, Holding]) -> ChangesReply:
        """Carry an order out.

        Raises:
            InvalidWeightsError: a changed element is NaN or infinite, and such weights are to be refused.
            PublishError: this rank has no such copy.
        """
        if isinstance(order, KeepOrder):
            return self._keep(order, holdings)
        if self._shadows is None or order.number != self._number:
            raise PublishError("this rank has no copy of the version that it is to compare with")
        if isinstance(order, CompareOrder):
            return self._compare(self._shadows, order.most, holdings)
        return self._gather(self._shadows, order)

    def _keep(self, order: KeepOrder, holdings: Mapping[str, Holding]) -> ChangesReply:
        self.drop()  # before the new copy is made: there need not be room for both
        claims = [replace(each.claim, boxes=each.claim.held_boxes) for each in holdings.values()]
        by_name = {claim.name: claim for claim in claims}
        ordered = sorted(order.parts, key=lambda part: (part.name, part.box, part.begin))
        sent, _ = sent_parts(ordered, claims)
        for each in sent:
            part, claim = each.part, by_name[each.part.name]
            whole = IndexMap(box=claim.boxes[part.box], shape=claim.shape, begin=part.begin, end=part.end)
            self._parts.append(ComparedPart(sent=each, map=whole))
        sources = self._read(holdings)
        self._shadows = Shadows(sources, stream=self._stream, parts=self._places())
        self._sums, _ = self._scanned(sources)
        self._devices, self._number = _devices(holdings), order.number
        return ChangesReply(shifts=self._sums)

    def _compare(self, shadows: Shadows, most: int, holdings: Mapping[str, Holding]) -> ChangesReply:
        sources = self._read(holdings)
        diff = shadows.find(sources, most)
        if diff.count > most:
            before = self._sums
            self._sums, bad = self._scanned(sources)
            moved = ((name, (found - before[name]) & MASK) for name, found in self._sums.items())
            shifts, packed = {name: shift for name, shift in moved if shift}, list[PackedChanges]()
        else:
            shifts, packed = self._translated(diff)
            bad = self._by_tensor((int(key), count) for key, count in diff.nonfinite.items())
            for name, shift in shifts.items():
                self._sums[name] = (self._sums[name] + shift) & MASK
        for name, count in bad.items() if self._check_finite else ():  # the others were checked before
            raise changes_not_finite(name, count)
        return ChangesReply(count=diff.count, shifts=shifts, packed=packed)

    def _gather(self, shadows: Shadows, order: GatherOrder) -> ChangesReply:
        local: dict[str, Indices] = {}
        whole: dict[str, Indices] = {}
        for number, part in enumerate(self._parts):
            if (wanted := order.wanted.get(part.name)) is not None:
                inside, at = part.map.to_part(wanted)
                if len(at):
                    local[_key(number)], whole[_key(number)] = at, wanted[inside]
        packed = [
            PackedChanges(
                names=[self._parts[int(key)].name],
                counts=[len(values)],
                indices=whole[key],
                values=values,
            )
            for key, values in shadows.gather(local).items()
        ]
        return ChangesReply(packed=packed)

    def _places(self) -> dict[str, PartPlace]:
        """Where the parts lie in the whole tensors."""
        found: dict[str, PartPlace] = {}
        for number, part in enumerate(self._parts):
            entry = part.sent.entry
            strips, elements = part.sent.rows(width_of(entry.dtype)), elements_of(entry.dtype, entry.shape)
            found[_key(number)] = PartPlace(strips, elements)
        return found

    def _read(self, holdings: Mapping[str, Holding]) -> list[TensorSource]:
        """The parts as tensors of their own, in order. They are views where the published dtype is the trainer's."""
        self.release()
        flat: tuple[tuple[str, int], Any] = ("", 0), None
        for number, part in enumerate(self._parts):
            holding, own = holdings[part.name], part.sent.part
            if flat[0] != (part.name, own.box) or flat[1] is None:
                flat = (part.name, own.box), flat_box(holding.plain(), holding.claim.held_boxes, own.box)
            casts = Casts((("*", holding.claim.dtype),))
            self._sources.append(torch_source(_key(number), flat[1][own.begin : own.end], casts))
        return self._sources

    def _scanned(self, sources: Sequence[TensorSource]) -> tuple[dict[str, int], dict[str, int]]:
        """What the parts add to each tensor's fingerprint, and how many of their elements are not finite, if any."""
        from refitd_client.fingerprint.device import flat_bits

        found: list[tuple[int, int]] = []
        for batch in _batches(sources):
            inputs = [
                PartInput(
                    flat_bits(source.tensor()),
                    self._parts[int(source.entry.name)].sent.rows(width_of(source.entry.dtype)),
                    rule_of(source.entry.dtype),
                )
                for source in batch
            ]
            found += [(each.fingerprint, each.nonfinite) for each in part_scans(inputs)]
        sums = self._by_tensor(enumerate(each for each, _ in found))
        bad = self._by_tensor((number, count) for number, (_, count) in enumerate(found) if count)
        return sums, bad

    def _translated(self, diff: ShadowDiff) -> tuple[dict[str, int], list[PackedChanges]]:
        """What changed, by indices of the whole tensors, and what that adds to the tensors' fingerprints."""
        kinds: dict[tuple[Any, Any, bool], list[tuple[int, ChangedElements]]] = {}
        for key, found in sorted(diff.found.items()):
            kind = self._parts[int(key)].map.kind, found.values.dtype, found.before is None
            kinds.setdefault(kind, []).append((int(key), found))
        shifts = self._by_tensor((int(key), shift) for key, shift in diff.shifts.items())
        packed: list[PackedChanges] = []
        for (kind, _, is_whole), pieces in kinds.items():
            names = [self._parts[part].name for part, _ in pieces]
            counts = [len(found.indices) for _, found in pieces]
            values = in_a_row([found.values for _, found in pieces])
            if is_whole:
                indices = in_a_row([found.indices for _, found in pieces])
            else:
                indices = self._to_whole(pieces, counts, kind)
                before = in_a_row([cast("Bits", found.before) for _, found in pieces])
                for name, shift in zip(names, shifts_of(counts, indices, values, before), strict=True):
                    shifts[name] = (shifts.get(name, 0) + shift) & MASK
            packed.append(PackedChanges(names=names, counts=counts, indices=indices, values=values))
        return shifts, packed

    def _to_whole(self, pieces: Sequence[tuple[int, ChangedElements]], counts: Sequence[int], kind: Any) -> Indices:
        """The indices of pieces, one after the other, in their whole tensors."""
        indices = cast("Indices", np.empty(sum(counts), kind))
        places = [slice(*ends) for ends in pairwise(accumulate(counts, initial=0))]

        def fill(number: int, _: Event) -> None:
            part, found = pieces[number]
            self._parts[part].map.to_whole(found.indices, indices[places[number]])

        jobs = [partial(fill, number) for number in range(len(pieces))]
        in_lanes(jobs, lanes=lanes_for(len(jobs)) if len(indices) >= MANY_CHANGES else 1)
        return indices

    def _by_tensor(self, numbers: Iterable[tuple[int, int]]) -> dict[str, int]:
        """Numbers of parts, added up by tensor."""
        sums: dict[str, int] = {}
        for number, each in numbers:
            name = self._parts[number].name
            sums[name] = (sums.get(name, 0) + each) & MASK
        return sums


def unpacked(packed: Iterable[PackedChanges]) -> Iterator[tuple[str, Indices, Bits]]:
    """The pieces: tensor, indices and bits of each."""
    for each in packed:
        for name, (begin, end) in zip(each.names, pairwise(accumulate(each.counts, initial=0)), strict=True):
            yield name, each.indices[begin:end], each.values[begin:end]


def _key(number: int) -> str:
    return f"{number:08d}"


def _devices(holdings: Mapping[str, Holding]) -> dict[str, str]:
    return {name: str(each.tensor.device) for name, each in holdings.items()}


def _batches(sources: Sequence[TensorSource]) -> Iterator[list[TensorSource]]:
    """Sources whose casts take little memory together."""
    batch: list[TensorSource] = []
    made = 0
    for source in sources:
        if batch and made >= CASTS_BYTES:
            yield batch
            batch, made = [], 0
        batch.append(source)
        made += 0 if source.is_view else source.entry.nbytes
    if batch:
        yield batch
