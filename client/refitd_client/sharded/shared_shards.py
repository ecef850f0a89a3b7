"""The weights of a version that all ranks hold together, as a publisher has those of one process.

Each rank has the shadow of its own parts. Rank 0 numbers each shadow. Every opening says which one a rank has, and
every outcome which one stands: so a rank that has lost its copy, or kept one of a version that was given up, is never
asked to compare with it.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refitd_client.checkpoint.header import Entry
from refitd_client.contract.manifest import ManifestFile, joined
from refitd_client.contract.naming import ShardLayout
from refitd_client.delta.change import Indices
from refitd_client.delta.shadow import OTHERS, ChangedElements, ShadowDiff
from refitd_client.errors import PublishError
from refitd_client.files import durable
from refitd_client.files.durable import Mappings
from refitd_client.fingerprint import Bits
from refitd_client.fingerprint.host import MASK
from refitd_client.lanes import in_lanes, lanes_for
from refitd_client.sharded.layout import AgreedLayout, ranks_named, spread
from refitd_client.sharded.orders import (
    BlocksOrder,
    BlocksReply,
    ChangesReply,
    CompareOrder,
    CopiedReply,
    CopyOrder,
    DigestOrder,
    DoneReply,
    FailedReply,
    GatherOrder,
    KeepOrder,
    LendOrder,
    RankOrder,
    RankReply,
    RankTask,
    WriteOrder,
)
from refitd_client.sharded.parts import entries_of
from refitd_client.sharded.rank_export import RankExport
from refitd_client.sharded.rank_group import RankGroup, error_of_rank, succeeded
from refitd_client.sharded.rank_shadow import compared_parts, join, unpacked
from refitd_client.sharded.rank_slot import begin_progress
from refitd_client.sharded.shared_export import LentLayout, SharedExport
from refitd_client.sharded.slot_plan import digests_of_files
from refitd_client.transport.handover import Exported
from refitd_client.transport.needs import PartialNeeds
from refitd_client.transport.sending import Destination
from refitd_client.ways import TrainerPlace
from refitd_client.write.version_folder import Staging, open_recycled


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
    tensors.
    """

    def __init__(self, shards: "SharedShards") -> None:
        """Have every rank copy its parts.

        Raises:
            PublishError: a rank could not, or is lost.
        """
        self._shards, self._count = shards, shards.shadow_count
        self._layout = shards.agreed.number
        parts = compared_parts(shards.agreed.claims, shards.agreed.layout)
        self._names = [frozenset(part.name for part in own) for own in parts]
        self._number = self._count.begin()
        orders = [KeepOrder(number=self._number, parts=own) for own in parts]
        self.fingerprints = {entry.name: 0 for entry in entries_of(shards.agreed.layout)}
        self._add(self._asked(orders, "copy what it compares"))
        self._count.number = self._number

    def unfit(self, shards: "SharedShards") -> str | None:
        """Why the ranks cannot compare; None where every rank has the copy, and holds the same parts as then."""
        if shards.agreed.number != self._layout:
            return OTHERS
        without = [rank for rank, number in enumerate(shards.shadow_numbers) if number != self._number]
        if not without:
            return None
        has = "has" if len(without) == 1 else "have"
        return f"nothing to compare with: {ranks_named(without)} {has} no copy of the last version"

    def find(self, shards: "SharedShards", most: int) -> ShadowDiff:
        """As `Shadow.find`, of all ranks. A value that is not finite is refused by the rank that has it.

        Raises:
            PublishError: a rank could not, or is lost.
        """
        self._shards = shards
        orders = [CompareOrder(number=self._number, most=most)] * len(self._names)
        replies = self._asked(orders, "compare its part")
        self._add(replies)
        count = sum(reply.count for reply in replies)
        if count > most:
            return ShadowDiff(count=count)
        return ShadowDiff(count=count, found=_joined(replies))

    def gather(self, wanted: Mapping[str, Indices]) -> dict[str, Bits]:
        """As `Shadow.gather`, of all ranks.

        Raises:
            PublishError: a rank could not, or is lost.
        """
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
            match reply:
                case ChangesReply():
                    found.append(reply)
                case FailedReply(error=error):
                    raise error_of_rank(rank, error) from error
                case other:
                    raise PublishError(f"rank {rank} says {other!r}: do all ranks run one refitd?")
        return found


def _joined(replies: Sequence[ChangesReply]) -> dict[str, ChangedElements]:
    """The changes of whole tensors, in order of name: one behind the other, so that they are written in few pieces."""
    pieces: dict[str, list[tuple[Indices, Bits]]] = {}
    for reply in replies:
        for name, indices, values in unpacked(reply.packed):
            pieces.setdefault(name, []).append((indices, values))
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


Answer = Callable[[RankOrder], RankReply]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedShards:
    """The weights of a version, written by all ranks into rank 0's staging folder, and sent by all before that.

    `known` are the numbers of the layouts that the ranks have, by rank; `answer` is rank 0's own follower, and `export`
    has its part in transfers. `places` say where each rank's tensors are, by rank. `needs_told` are the digests of
    needs that all ranks know from the transfer before, `lent` where the hand-over before found shards.
    `shadow_numbers` are those of the ranks' shadows; `are_on_gpus`: each rank's tensors are on one GPU.
    """

    root: Path
    agreed: AgreedLayout
    known: list[int]
    needs_told: set[str]
    lent: LentLayout
    rank_group: RankGroup
    answer: Answer
    export: RankExport
    fingerprinted: bool | None
    shadow_count: ShadowCount
    shadow_numbers: list[int]
    are_on_gpus: bool
    places: Sequence[TrainerPlace] = ()

    @property
    def check_finite(self) -> bool:
        """Whether ranks refuse values that are not finite."""
        return self.agreed.layout.shards.check_finite

    def shadows(self) -> SharedShadows:
        """Have every rank copy what it compares."""
        return SharedShadows(self)

    @property
    def tensors(self) -> dict[str, list[Entry]]:
        return self.agreed.layout.shards.tensors

    @property
    def size(self) -> int:
        """The bytes that the shards will take."""
        return self.agreed.layout.shards.size

    @property
    def layout(self) -> Sequence[ShardLayout]:
        """What a slot has to look like for them."""
        return self.agreed.layout.shards.layout

    def exported(self, destination: Destination | None) -> Exported:
        """The shards of all ranks, on their way to the receivers; without these they are lent where they lie."""
        return SharedExport(self, destination)

    def scanned(self) -> "SharedShards":
        """The same, of which fingerprints are known."""
        return replace(self, fingerprinted=False)

    def to_be_scanned(self) -> "SharedShards":
        """The same, to be written with fingerprints."""
        return replace(self, fingerprinted=True)

    def ask(self, orders: Sequence[RankOrder], doing: str) -> list[RankReply]:
        """Give each rank its order, and return their replies.

        Raises:
            RankLostError: a rank is gone.
        """
        self.rank_group.tell_all(orders, are_orders=True)
        return self.rank_group.hear_all(self.answer(orders[0]), doing)

    def lend_orders(self, known: Callable[[int], int] | None, partial: Mapping[str, PartialNeeds]) -> list[RankOrder]:
        """Each rank's order to lend its part.

        Args:
            known: gives the number of the places that are known of a rank; None where places are not wanted.
            partial: what engine ranks need, by its digest.
        """
        told = {digest: None if digest in self.needs_told else needs for digest, needs in partial.items()}
        if partial:
            self.needs_told.clear()  # until all have it
        return [
            LendOrder(task=self._task(rank), known=None if known is None else known(rank), partial=told)
            for rank in range(self.rank_group.size)
        ]

    def are_told(self, partial: Mapping[str, PartialNeeds]) -> None:
        """All ranks have carried out these orders."""
        self.known[:] = [self.agreed.number] * len(self.known)
        self.needs_told.update(partial)

    def stage(self, staging: Staging) -> Callable[[], None]:
        """As `write`: nothing is left to do after it."""
        self.write(staging)
        return lambda: None

    def write(self, staging: Staging) -> None:
        """Have every rank write its parts, and the files digested: meanwhile where GPUs copy into a slot, else then.

        Raises:
            PublishError: a rank failed, was lost, or has no room.
        """
        if not staging.recycled:
            staging.require_space(self.size)
        sizes, ranks = self._create(staging), range(self.rank_group.size)
        if self.are_on_gpus and _is_in_memory(staging, sizes):
            self._copy(staging, sizes)
            return
        orders: list[RankOrder] = [WriteOrder(staging=staging.path.name, task=self._task(rank)) for rank in ranks]
        self._all(orders, "write its part")
        shares = spread(sizes, self.rank_group.size)
        orders = [DigestOrder(names=names, fingerprints=self.fingerprinted is True) for names in shares]
        entries: dict[str, ManifestFile] = {}
        for done in self._all(orders, "digest its files"):
            entries |= done.files
            staging.fingerprints.update(done.fingerprints)
        staging.files.update({name: entries[name] for name in sizes})  # in the order of a gathered save

    def _copy(self, staging: Staging, sizes: Mapping[str, int]) -> None:
        """Have every rank's GPU copy its parts into the slot, and every rank digest its blocks meanwhile."""
        ranks, name = range(self.rank_group.size), staging.path.name
        is_fingerprinted = self.fingerprinted is not False
        progress = begin_progress(staging.path, len(sizes), len(ranks))
        orders: list[RankOrder] = [
            CopyOrder(staging=name, task=self._task(rank), fingerprints=is_fingerprinted) for rank in ranks
        ]
        copied: list[CopiedReply] = succeeded(self.ask(orders, "copy its part"))
        if is_fingerprinted:
            staging.fingerprints.update((each.name, 0) for entries in self.tensors.values() for each in entries)
            for reply in copied:
                for tensor, (share, _) in reply.scans.items():
                    staging.fingerprints[tensor] = (staging.fingerprints[tensor] + share) & MASK
        orders = [BlocksOrder() for _ in ranks]
        replies: list[BlocksReply] = succeeded(self.ask(orders, "digest its blocks"))
        durable.remove_file(progress)
        digests = digests_of_files(list(sizes.values()), [reply.digests for reply in replies])
        for (file, size), blocks in zip(sizes.items(), digests, strict=True):
            _sync(staging.path / file)
            staging.files[file] = ManifestFile(size=size, digest=joined(blocks))

    def _create(self, staging: Staging) -> dict[str, int]:
        """Make the files with their headers, at full size. Returns the sizes by name."""
        sizes: dict[str, int] = {}
        for shard in self.agreed.layout.shards.shards:
            sizes[shard.name] = shard.size
            path, is_there = staging.path / shard.name, shard.name in staging.recycled
            fd = open_recycled(path) if is_there else durable.create(path)
            try:
                if not is_there:  # a recycled file has its size, and is never truncated
                    durable.resize(fd, shard.size)
                durable.write_at(fd, memoryview(shard.header), 0)
                durable.sync(fd)
            finally:
                os.close(fd)
        return sizes

    def _task(self, rank: int) -> RankTask | None:
        """What a rank has to know of the layout; None where it does."""
        if self.known[rank] == self.agreed.number:
            return None
        layout, files = self.agreed.layout, [shard.name for shard in self.agreed.layout.shards.shards]
        return RankTask(number=self.agreed.number, files=files, locations=layout.locations, parts=layout.parts[rank])

    def _all(self, orders: Sequence[RankOrder], doing: str) -> list[DoneReply]:
        return succeeded(self.ask(orders, doing))


def _is_in_memory(staging: Staging, names: Iterable[str]) -> bool:
    """Whether all of these are a slot's files, which any process of this host may write through a mapping."""
    if not staging.recycled.issuperset(names):
        return False
    mappings = Mappings()
    for name in names:
        fd = open_recycled(staging.path / name)
        try:
            if not mappings.may_map(fd):
                return False
        finally:
            os.close(fd)
    return True


def _sync(path: Path) -> None:
    """Sync a file that other processes have written through mappings."""
    fd = open_recycled(path)
    try:
        durable.touch(fd)
        durable.sync(fd)
    finally:
        os.close(fd)
