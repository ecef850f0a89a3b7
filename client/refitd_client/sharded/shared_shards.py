"""The weights of a version that all ranks hold together, as a publisher has those of one process."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from refitd_client.checkpoint.header import Entry
from refitd_client.contract.manifest import ManifestFile, joined
from refitd_client.contract.naming import ShardLayout
from refitd_client.files import durable
from refitd_client.files.durable import Mappings
from refitd_client.fingerprint.host import MASK
from refitd_client.sharded import orders
from refitd_client.sharded.export import LentLayout, SharedExport
from refitd_client.sharded.follower import Follower
from refitd_client.sharded.layout import AgreedLayout, spread
from refitd_client.sharded.rank_group import RankGroup, succeeded
from refitd_client.sharded.rank_shadow import ShadowCount, SharedShadows
from refitd_client.sharded.rank_slot import begin_progress, digests_of_files
from refitd_client.transport.choice import TrainerPlace
from refitd_client.transport.sending import Destination
from refitd_client.write.version_folder import Staging, open_recycled


@dataclass(frozen=True, slots=True)
class LeadState:
    """What rank 0 has for all publications. `follower` is its own part in them."""

    root: Path
    rank_group: RankGroup
    follower: Follower
    lent: LentLayout = field(default_factory=LentLayout)
    shadow_count: ShadowCount = field(default_factory=ShadowCount)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedShards:
    """The weights of a version, written by all ranks into rank 0's staging folder, and sent by all before that.

    `opened` is what ranks came with, by rank, and `known` the numbers of the layouts that they have.
    """

    lead: LeadState
    agreed: AgreedLayout
    opened: Sequence[orders.Opening]
    known: list[int]
    fingerprinted: bool | None

    @property
    def ranks(self) -> int:
        return self.lead.rank_group.size

    @property
    def places(self) -> Sequence[TrainerPlace]:
        """Where each rank's tensors are, by rank."""
        return [each.place for each in self.opened if each.place is not None]

    @property
    def check_finite(self) -> bool:
        """Whether ranks refuse values that are not finite."""
        return self.agreed.layout.shards.check_finite

    @property
    def tensors(self) -> dict[str, list[Entry]]:
        return self.agreed.layout.shards.tensors

    @property
    def size(self) -> int:
        return self.agreed.layout.shards.size

    @property
    def layout(self) -> Sequence[ShardLayout]:
        """What a slot has to look like for them."""
        return self.agreed.layout.shards.layout

    def shadows(self) -> SharedShadows:
        """Have every rank copy what it compares."""
        return SharedShadows(self)

    def exported(self, destination: Destination | None) -> SharedExport:
        """The shards of all ranks, on their way to the receivers; without these they are lent where they lie."""
        return SharedExport(self, destination)

    def scanned(self) -> "SharedShards":
        """The same, of which fingerprints are known."""
        return replace(self, fingerprinted=False)

    def to_be_scanned(self) -> "SharedShards":
        """The same, to be written with fingerprints."""
        return replace(self, fingerprinted=True)

    def ask(self, asked: Sequence[orders.RankOrder], doing: str) -> list[orders.RankReply]:
        """Give each rank its order, and return their replies. Raises RankLostError: a rank is gone."""
        self.lead.rank_group.tell_all(asked, are_orders=True)
        return self.lead.rank_group.hear_all(self.lead.follower.answer(asked[0]), doing)

    def task_of(self, rank: int) -> orders.RankTask | None:
        """What a rank has to know of the layout; None where it does."""
        if self.known[rank] == self.agreed.number:
            return None
        layout, files = self.agreed.layout, [shard.name for shard in self.agreed.layout.shards.shards]
        return orders.RankTask(
            number=self.agreed.number, files=files, locations=layout.locations, parts=layout.parts[rank]
        )

    def all_know_the_task(self) -> None:
        """All ranks have carried out an order that had it."""
        self.known[:] = [self.agreed.number] * len(self.known)

    def stage(self, staging: Staging) -> Callable[[], None]:
        """As `write`: nothing is left to do after it."""
        self.write(staging)
        return lambda: None

    def write(self, staging: Staging) -> None:
        """Have every rank write its parts, and the files digested: meanwhile where GPUs copy into a slot, else then.
        Raises PublishError: a rank failed, was lost, or has no room.
        """
        if not staging.recycled:
            staging.require_space(self.size)
        sizes, ranks = self._create(staging), range(self.ranks)
        if all(each.is_on_gpu for each in self.opened) and _is_in_memory(staging, sizes):
            self._copy(staging, sizes)
            return
        name = staging.path.name
        self._all([orders.WriteOrder(staging=name, task=self.task_of(rank)) for rank in ranks], "write its part")
        shares = spread(sizes, self.ranks)
        asked = [orders.DigestOrder(names=names, fingerprints=self.fingerprinted is True) for names in shares]
        entries: dict[str, ManifestFile] = {}
        for done in self._all(asked, "digest its files"):
            entries |= done.files
            staging.fingerprints.update(done.fingerprints)
        staging.files.update({name: entries[name] for name in sizes})  # in the order of a gathered save

    def _copy(self, staging: Staging, sizes: Mapping[str, int]) -> None:
        """Have every rank's GPU copy its parts into the slot, and every rank digest its blocks meanwhile."""
        name, is_fingerprinted = staging.path.name, self.fingerprinted is not False
        progress = begin_progress(staging.path, len(sizes), self.ranks)
        asked = [
            orders.CopyOrder(staging=name, task=self.task_of(rank), fingerprints=is_fingerprinted)
            for rank in range(self.ranks)
        ]
        copied: list[orders.CopiedReply] = succeeded(self.ask(asked, "copy its part"))
        if is_fingerprinted:
            staging.fingerprints.update((each.name, 0) for entries in self.tensors.values() for each in entries)
            for tensor, (share, _) in (item for reply in copied for item in reply.scans.items()):
                staging.fingerprints[tensor] = (staging.fingerprints[tensor] + share) & MASK
        replies: list[orders.BlocksReply] = succeeded(
            self.ask([orders.BlocksOrder()] * self.ranks, "digest its blocks")
        )
        durable.remove_file(progress)
        digests = digests_of_files(list(sizes.values()), [reply.digests for reply in replies])
        for (file, size), blocks in zip(sizes.items(), digests, strict=True):
            fd = open_recycled(staging.path / file)
            try:
                durable.touch(fd)  # other processes have written it through mappings
                durable.sync(fd)
            finally:
                os.close(fd)
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

    def _all(self, asked: Sequence[orders.RankOrder], doing: str) -> list[orders.DoneReply]:
        return succeeded(self.ask(asked, doing))


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
