"""The weights of a version that all ranks write: rank 0 makes the files, and has the others fill and digest them."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from refitd_client.checkpoint.header import Entry
from refitd_client.contract.manifest import ManifestFile
from refitd_client.contract.slot import ShardLayout
from refitd_client.files import durable
from refitd_client.sharded import blame
from refitd_client.sharded.claims import Claim
from refitd_client.sharded.layout import Layout, spread
from refitd_client.sharded.messages import Digest, Done, Failed, Task, Write
from refitd_client.sharded.rank_group import RankGroup
from refitd_client.write.slots import open_shard
from refitd_client.write.version_folder import Staging

Answer = Callable[[Write | Digest], Done | Failed]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The layout that was last agreed on, its number, and the claims that it was made from."""

    number: int
    claims: list[list[Claim]]
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedShards:
    """The weights of a version, written by all ranks into rank 0's staging folder."""

    planned: Planned
    known: Sequence[int]
    """The number of the layout that each rank has from before."""
    rank_group: RankGroup
    answer: Answer
    fingerprinted: bool

    @property
    def tensors(self) -> dict[str, list[Entry]]:
        """What is in each shard."""
        return self.planned.layout.shards.tensors

    @property
    def size(self) -> int:
        """The bytes that the shards will take."""
        return self.planned.layout.shards.size

    @property
    def layout(self) -> Sequence[ShardLayout]:
        """What a slot has to look like for them."""
        return self.planned.layout.shards.layout

    def stage(self, staging: Staging) -> Callable[[], None]:
        """As `write`: nothing is left to do after it."""
        self.write(staging)
        return _nothing

    def write(self, staging: Staging) -> None:
        """Have every rank write its parts, then have the files digested. Each phase ends when all ranks are done.

        Raises:
            PublishError: a rank failed, was lost, or has no room.
        """
        if not staging.recycled:
            staging.require_space(self.size)
        sizes = self._create(staging)
        self._all([self._order(rank, staging.path.name) for rank in range(self.rank_group.size)], "write its part")
        shares = spread(sizes, self.rank_group.size)
        orders = [Digest(names=names, fingerprints=self.fingerprinted) for names in shares]
        answers = self._all(orders, "digest its files")
        entries: dict[str, ManifestFile] = {name: file for done in answers for name, file in done.files.items()}
        staging.files.update({name: entries[name] for name in sizes})  # in the order of a gathered save
        for done in answers:
            staging.fingerprints.update(done.fingerprints)

    def _create(self, staging: Staging) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for shard in self.planned.layout.shards.shards:
            sizes[shard.name] = shard.size
            path, is_there = staging.path / shard.name, shard.name in staging.recycled
            fd = open_shard(path) if is_there else durable.create(path)
            try:
                if not is_there:  # what is recycled has its size, and is never truncated
                    durable.resize(fd, shard.size)
                durable.write_at(fd, memoryview(shard.header), 0)
                durable.sync(fd)
            finally:
                os.close(fd)
        return sizes

    def _order(self, rank: int, folder: str) -> Write:
        task: Task | None = None
        if self.known[rank] != self.planned.number:
            layout = self.planned.layout
            task = Task(
                number=self.planned.number,
                files=list(self.tensors),
                locations=layout.locations,
                parts=layout.parts[rank],
            )
        return Write(staging=folder, task=task)

    def _all(self, orders: Sequence[Write | Digest], doing: str) -> list[Done]:
        self.rank_group.tell_all(orders)
        return _done(self.rank_group.hear_all(self.answer(orders[0]), doing))


def _done(answers: Sequence[Any]) -> list[Done]:
    done: list[Done] = []
    for rank, answer in enumerate(answers):
        if isinstance(answer, Failed):
            raise blame.of_rank(rank, answer.error) from answer.error
        done.append(answer)
    return done


def _nothing() -> None:
    """All is written."""
