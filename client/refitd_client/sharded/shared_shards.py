"""The weights of a version that all ranks hold together, as a publisher writes and sends those of one process."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from refitd_client.checkpoint.header import Entry
from refitd_client.contract.manifest import ManifestFile, joined
from refitd_client.contract.naming import ShardLayout
from refitd_client.files import durable
from refitd_client.files.durable import Mappings
from refitd_client.fingerprint.host import MASK
from refitd_client.sharded.agreement import AgreedLayout, succeeded
from refitd_client.sharded.layout import spread
from refitd_client.sharded.lend_orders import LendOrder
from refitd_client.sharded.lending import LentLayout, LentShards
from refitd_client.sharded.rank_group import (
    DigestOrder,
    DoneReply,
    RankGroup,
    RankOrder,
    RankReply,
    RankTask,
    StagedReply,
    StageOrder,
    WriteOrder,
)
from refitd_client.sharded.rank_progress import begin_progress
from refitd_client.sharded.rank_sender import RankSender
from refitd_client.sharded.sending import ShardsOnTheirWay
from refitd_client.sharded.shared_shadows import ShadowCount, SharedShadows
from refitd_client.sharded.slot_orders import BlocksOrder, BlocksReply, CopyOrder
from refitd_client.sharded.slot_pieces import digests_of_files
from refitd_client.transport.exported import Exported
from refitd_client.transport.group.sending import Destination
from refitd_client.transport.shards.needs import PartialNeeds
from refitd_client.transport.ways import TrainerPlace
from refitd_client.write.version_folder import Staging, open_recycled

Answer = Callable[[RankOrder], RankReply]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedShards:
    """The weights of a version, written by all ranks into rank 0's staging folder, and sent by all before that.

    `known` are the numbers of the layouts that the ranks have, by rank; `answer` is rank 0's own follower, and `sender`
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
    sender: RankSender
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
        """What is in each shard."""
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
        return LentShards(self, self.lent) if destination is None else ShardsOnTheirWay(self, destination)

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

    def stage_orders(self, partial: Mapping[str, PartialNeeds]) -> list[RankOrder]:
        """Each rank's order to stage what it sends. `partial` is what engine ranks need, by its digest."""
        told = {digest: None if digest in self.needs_told else needs for digest, needs in partial.items()}
        self.needs_told.clear()  # until all have it
        return [StageOrder(task=self._task(rank), partial=told) for rank in range(self.rank_group.size)]

    def lend_orders(self, known: Callable[[int], int]) -> list[RankOrder]:
        """Each rank's order to lend its part. `known` gives the number of the places that are known of a rank."""
        return [LendOrder(task=self._task(rank), known=known(rank)) for rank in range(self.rank_group.size)]

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
        copied: list[StagedReply] = succeeded(self.ask(orders, "copy its part"))
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
