"""Deltas of several ranks: each has a copy of the parts that it writes (`RankShadow`), and rank 0 asks all of them.

So each element is compared once, whichever ranks hold it. A part is compared as a tensor of its own, by the same
shadows as one process has (`delta/shadow.py`). A GPU says what changed by the whole tensor's indices, and what that
adds to its fingerprint. Both is computed here of parts in host memory.

Rank 0 numbers each shadow (`SharedShadows`). Every opening says which one a rank has, and every outcome which one
stands: so a rank that has lost its copy, or kept one of a version that was given up, is never asked to compare with it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from threading import Event
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from refitd_client.checkpoint.finite import rule_of
from refitd_client.delta.change import MANY_CHANGES, Indices, in_a_row
from refitd_client.delta.shadow import OTHERS, ChangedElements, ShadowDiff, Shadows
from refitd_client.errors import PublishError
from refitd_client.fingerprint import Bits
from refitd_client.fingerprint.host import MASK, shifts_of
from refitd_client.fingerprint.tensors import CASTS_BYTES, PartInput, PartPlace, part_scans
from refitd_client.lanes import in_lanes, lanes_for
from refitd_client.publish.options import DeltaRules
from refitd_client.sharded.holdings import Holding
from refitd_client.sharded.layout import ranks_named
from refitd_client.sharded.orders import (
    ChangesReply,
    CompareOrder,
    FailedReply,
    GatherOrder,
    KeepOrder,
    PackedChanges,
    RankOrder,
)
from refitd_client.sharded.parts import SentPart, entries_of, flat_part
from refitd_client.sharded.rank_group import error_of_rank
from refitd_client.tensors import Casts, TensorSource, torch_source
from refitd_client.write.plan import changes_not_finite

if TYPE_CHECKING:
    from refitd_client.sharded.shared_shards import SharedShards


class RankShadow:
    """The copy, and the number that rank 0 gave it: 0 where there is none. `rules` are this rank's word on deltas."""

    def __init__(self, rules: DeltaRules, *, stream: bool, check_finite: bool) -> None:
        self.rules = rules
        self._number = 0
        self._stream = stream
        self._check_finite = check_finite
        self._parts: list[SentPart] = []
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
        for source in self._sources:
            if source.held is not None:
                source.held.value = None
        self._sources = []

    def keep(self, number: int, parts: Sequence[SentPart], holdings: Mapping[str, Holding]) -> ChangesReply:
        """Copy the parts, as shadow `number`."""
        self.drop()  # before the new copy is made: there need not be room for both
        self._parts = sorted(parts, key=lambda each: (each.entry.name, each.part.box, each.part.begin))
        sources = self._read(holdings)
        places = {_key(number): PartPlace(part.rows, part.elements) for number, part in enumerate(self._parts)}
        self._shadows = Shadows(sources, stream=self._stream, parts=places)
        self._sums, _ = self._scanned(sources)
        self._devices, self._number = _devices(holdings), number
        return ChangesReply(shifts=self._sums)

    def answer(self, order: CompareOrder | GatherOrder, holdings: Mapping[str, Holding]) -> ChangesReply:
        """Compare the parts with the copy, or say what is in it. Raises InvalidWeightsError: a changed element is NaN
        or infinite, and such weights are to be refused; PublishError: this rank has no such copy.
        """
        if self._shadows is None or order.number != self._number:
            raise PublishError("this rank has no copy of the version that it is to compare with")
        if isinstance(order, GatherOrder):
            return self._gather(self._shadows, order)
        return self._compare(self._shadows, order, holdings)

    def _compare(self, shadows: Shadows, order: CompareOrder, holdings: Mapping[str, Holding]) -> ChangesReply:
        sources = self._read(holdings)
        diff = shadows.find(sources, order.most)
        if diff.count > order.most:
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
            if (wanted := order.wanted.get(part.entry.name)) is not None:
                inside, at = part.to_part(wanted)
                if len(at):
                    local[_key(number)], whole[_key(number)] = at, inside
        packed = [
            PackedChanges(
                names=[self._parts[int(key)].entry.name], counts=[len(values)], indices=whole[key], values=values
            )
            for key, values in shadows.gather(local).items()
        ]
        return ChangesReply(packed=packed)

    def _read(self, holdings: Mapping[str, Holding]) -> list[TensorSource]:
        """The parts as tensors of their own, in order. They are views where the published dtype is the trainer's."""
        self.release()
        for number, part in enumerate(self._parts):
            holding = holdings[part.entry.name]
            casts = Casts((("*", holding.claim.dtype),))
            self._sources.append(torch_source(_key(number), flat_part(holding, part.part), casts))
        return self._sources

    def _scanned(self, sources: Sequence[TensorSource]) -> tuple[dict[str, int], dict[str, int]]:
        """What the parts add to each tensor's fingerprint, and how many of their elements are not finite, if any."""
        from refitd_client.fingerprint.device import flat_bits

        found: list[tuple[int, int]] = []
        for batch in _batches(sources):
            inputs = [
                PartInput(
                    flat_bits(source.tensor()),
                    self._parts[int(source.entry.name)].rows,
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
        kinds: dict[tuple[Any, Any, bool], list[tuple[SentPart, ChangedElements]]] = {}
        for key, found in sorted(diff.found.items()):
            part = self._parts[int(key)]
            kinds.setdefault((part.index_type, found.values.dtype, found.before is None), []).append((part, found))
        shifts = self._by_tensor((int(key), shift) for key, shift in diff.shifts.items())
        packed: list[PackedChanges] = []
        for (kind, _, is_whole), pieces in kinds.items():
            names = [part.entry.name for part, _ in pieces]
            counts = [len(found.indices) for _, found in pieces]
            values = in_a_row([found.values for _, found in pieces])
            if is_whole:
                indices = in_a_row([found.indices for _, found in pieces])
            else:
                indices = _to_whole(pieces, counts, kind)
                before = in_a_row([cast("Bits", found.before) for _, found in pieces])
                for name, shift in zip(names, shifts_of(counts, indices, values, before), strict=True):
                    shifts[name] = (shifts.get(name, 0) + shift) & MASK
            packed.append(PackedChanges(names=names, counts=counts, indices=indices, values=values))
        return shifts, packed

    def _by_tensor(self, numbers: Iterable[tuple[int, int]]) -> dict[str, int]:
        """Numbers of parts, added up by tensor."""
        sums: dict[str, int] = {}
        for number, each in numbers:
            name = self._parts[number].entry.name
            sums[name] = (sums.get(name, 0) + each) & MASK
        return sums


def _to_whole(pieces: Sequence[tuple[SentPart, ChangedElements]], counts: Sequence[int], kind: Any) -> Indices:
    """The indices of pieces, one after the other, in their whole tensors."""
    indices = cast("Indices", np.empty(sum(counts), kind))
    places = [slice(*ends) for ends in pairwise(accumulate(counts, initial=0))]

    def fill(number: int, _: Event) -> None:
        part, found = pieces[number]
        part.to_whole(found.indices, indices[places[number]])

    jobs = [partial(fill, number) for number in range(len(pieces))]
    in_lanes(jobs, lanes=lanes_for(len(jobs)) if len(indices) >= MANY_CHANGES else 1)
    return indices


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


@dataclass(slots=True)
class ShadowCount:
    """How many shadows rank 0 has had, and the number of the one that stands: 0 where none does."""

    made: int = 0
    number: int = 0

    def begin(self) -> int:
        self.made, self.number = self.made + 1, 0
        return self.made


class SharedShadows:
    """The shadow of a version, as rank 0 sees it (`delta.shadow.VersionShadows`). `fingerprints` are those of the whole
    tensors. What it asks of ranks raises PublishError: a rank could not, or is lost.
    """

    def __init__(self, shards: "SharedShards") -> None:
        self._shards, self._count = shards, shards.lead.shadow_count
        self._layout = shards.agreed.number
        self._names = [{part.name for part in own} for own in shards.agreed.layout.parts]
        self._number = self._count.begin()
        orders = [KeepOrder(number=self._number, task=shards.task_of(rank)) for rank in range(shards.ranks)]
        self.fingerprints = {entry.name: 0 for entry in entries_of(shards.agreed.layout)}
        self._add(self._asked(orders, "copy what it compares"))
        shards.all_know_the_task()
        self._count.number = self._number

    def unfit(self, shards: "SharedShards") -> str | None:
        """Why the ranks cannot compare; None where every rank has the copy, and holds the same parts as then."""
        if shards.agreed.number != self._layout:
            return OTHERS
        without = [rank for rank, opened in enumerate(shards.opened) if opened.shadow != self._number]
        if not without:
            return None
        has = "has" if len(without) == 1 else "have"
        return f"nothing to compare with: {ranks_named(without)} {has} no copy of the last version"

    def find(self, shards: "SharedShards", most: int) -> ShadowDiff:
        """As `Shadow.find`, of all ranks. A value that is not finite is refused by the rank that has it."""
        self._shards = shards
        replies = self._asked([CompareOrder(number=self._number, most=most)] * shards.ranks, "compare its part")
        self._add(replies)
        count = sum(reply.count for reply in replies)
        return ShadowDiff(count=count) if count > most else ShadowDiff(count=count, found=_joined(replies))

    def gather(self, wanted: Mapping[str, Indices]) -> dict[str, Bits]:
        """As `Shadow.gather`, of all ranks."""
        if not wanted:
            return {}
        orders = [
            GatherOrder(number=self._number, wanted={name: at for name, at in wanted.items() if name in names})
            for names in self._names
        ]
        found = _joined(self._asked(orders, "read its copy"))
        if any(name not in found or len(found[name].indices) != len(at) for name, at in wanted.items()):
            raise PublishError("the ranks' copies together are not those of whole tensors")
        return {name: found[name].values for name in wanted}

    def close(self) -> None:
        """Say that it does not stand any more. Ranks free their copies when they hear how the publication ended."""
        if self._count.number == self._number:
            self._count.number = 0

    def _add(self, replies: Sequence[ChangesReply]) -> None:
        for reply in replies:
            for name, shift in reply.shifts.items():
                self.fingerprints[name] = (self.fingerprints[name] + shift) & MASK

    def _asked(self, orders: Sequence[RankOrder], doing: str) -> list[ChangesReply]:
        found: list[ChangesReply] = []
        for rank, reply in enumerate(self._shards.ask(orders, doing)):
            if isinstance(reply, FailedReply):
                raise error_of_rank(rank, reply.error) from reply.error
            if not isinstance(reply, ChangesReply):
                raise PublishError(f"rank {rank} says {reply!r}: do all ranks run one refitd?")
            found.append(reply)
        return found


def _joined(replies: Sequence[ChangesReply]) -> dict[str, ChangedElements]:
    """The changes of whole tensors, in order of name: one behind the other, so that they are written in few pieces."""
    pieces: dict[str, list[tuple[Indices, Bits]]] = {}
    for packed in (packed for reply in replies for packed in reply.packed):
        ends = pairwise(accumulate(packed.counts, initial=0))
        for name, (begin, end) in zip(packed.names, ends, strict=True):
            pieces.setdefault(name, []).append((packed.indices[begin:end], packed.values[begin:end]))
    kinds: dict[tuple[Any, Any], list[str]] = {}
    for name in sorted(pieces):
        indices, values = pieces[name][0]
        kinds.setdefault((indices.dtype, values.dtype), []).append(name)
    found: dict[str, ChangedElements] = {}
    for types, names in kinds.items():
        ends = [0, *accumulate(sum(len(indices) for indices, _ in pieces[name]) for name in names)]
        rooms: list[NDArray[Any]] = [np.empty(ends[-1], kind) for kind in types]
        for name, (begin, end) in zip(names, pairwise(ends), strict=True):
            indices, values = (room[begin:end] for room in rooms)
            found[name] = ChangedElements(indices=indices, values=values)

    def put_together(name: str, _: Event) -> None:
        join(pieces[name], found[name].indices, found[name].values)

    jobs = [partial(put_together, name) for name in sorted(pieces, key=lambda name: -len(found[name].indices))]
    in_lanes(jobs, lanes=lanes_for(len(jobs)))
    return {name: found[name] for name in sorted(found)}


def join(pieces: Sequence[tuple[Indices, Bits]], indices: Indices, values: Bits) -> None:
    """Put the pieces of one tensor together, in strict order: into `indices` and `values`. Each piece is in strict
    order, and no two have an index in common.
    """
    ordered = sorted((piece for piece in pieces if len(piece[0])), key=lambda piece: int(piece[0][0]))
    np.concatenate([piece[0] for piece in ordered], out=indices)
    np.concatenate([piece[1] for piece in ordered], out=values)
    if not all(one[0][-1] < other[0][0] for one, other in pairwise(ordered)):
        order = np.argsort(indices, kind="stable")  # stable: it merges runs that are in order already
        indices[:], values[:] = indices[order], values[order]
