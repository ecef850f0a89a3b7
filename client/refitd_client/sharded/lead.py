"""Rank 0's part of a publication: what all ranks agree on, the files that they fill, and how it ended.

Rank 0 makes the files, has all ranks write and digest them, and commits them as a `WeightPublisher` would commit one
process's weights.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from refitd_client.checkpoint.header import Entry
from refitd_client.contract.manifest import ManifestFile
from refitd_client.contract.naming import Order, ShardLayout
from refitd_client.errors import RankLostError, ServiceError, StepConflictError
from refitd_client.files import durable
from refitd_client.http.connection import Connection
from refitd_client.http.publisher_client import ReceiversQuery
from refitd_client.publish.durability import DurabilityPolicy
from refitd_client.publish.publication import Publication, StagedPublication
from refitd_client.publish.publisher import WeightPublisher
from refitd_client.publish.route import PublishRoute
from refitd_client.sharded.alike import require_alike
from refitd_client.sharded.follower import Follower
from refitd_client.sharded.holdings import compare_samples
from refitd_client.sharded.layout import Claim, ShardedLayout, lay_out, spread
from refitd_client.sharded.lend_orders import LendOrder
from refitd_client.sharded.lending import LentLayout, LentShards
from refitd_client.sharded.rank_errors import argument_error_of_rank, error_of_rank
from refitd_client.sharded.rank_group import (
    DigestOrder,
    DoneReply,
    FailedReply,
    Opening,
    PublishedOutcome,
    RankGroup,
    RankOrder,
    RankReply,
    RankTask,
    RefusedOutcome,
    StageOrder,
    WriteOrder,
    portable,
    portable_service_error,
)
from refitd_client.sharded.rank_sender import RankSender
from refitd_client.sharded.routing import Asked, route_of_ranks
from refitd_client.sharded.sending import ShardsOnTheirWay
from refitd_client.sharded.shared_shadows import ShadowCount, SharedShadows
from refitd_client.transport.exported import Exported
from refitd_client.transport.group.choice import Transport
from refitd_client.transport.group.sending import Destination
from refitd_client.transport.handover import Handed
from refitd_client.transport.shards.needs import PartialNeeds
from refitd_client.write.content import BaseModel, Content
from refitd_client.write.plan import index_json
from refitd_client.write.version_folder import Staging, open_recycled

_log = logging.getLogger("refitd_client")

Answer = Callable[[RankOrder], RankReply]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeadOptions:
    """Options that only rank 0 needs. `connection` is where the service is, of `run`."""

    root: Path
    run: str
    connection: Connection | None
    base_model: str | os.PathLike[str] | None
    max_shard_bytes: int | None
    check_finite: bool
    fingerprinted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedLayout:
    """The layout that was last agreed on, its number, and the claims that it was made from."""

    number: int
    claims: list[list[Claim]]
    layout: ShardedLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedShards:
    """The weights of a version, written by all ranks into rank 0's staging folder, and sent by all before that.

    `known` are the numbers of the layouts that the ranks have, by rank; `answer` is rank 0's own follower, and `sender`
    has its part in transfers. `route` says how the version reaches engines, None where files alone do. `needs_told` are
    the digests of needs that all ranks know from the transfer before, `lent` where the hand-over before found shards.
    `shadow_numbers` are those of the ranks' shadows.
    """

    root: Path
    agreed: AgreedLayout
    known: list[int]
    needs_told: set[str]
    lent: LentLayout
    rank_group: RankGroup
    answer: Answer
    sender: RankSender
    fingerprinted: bool
    shadow_count: ShadowCount
    shadow_numbers: list[int]
    route: PublishRoute | None = None

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
        self.rank_group.tell_all(orders)
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
        """Have every rank write its parts, then have the files digested. Each phase ends when all ranks are done.

        Raises:
            PublishError: a rank failed, was lost, or has no room.
        """
        if not staging.recycled:
            staging.require_space(self.size)
        sizes = self._create(staging)
        ranks = range(self.rank_group.size)
        orders: list[RankOrder] = [WriteOrder(staging=staging.path.name, task=self._task(rank)) for rank in ranks]
        self._all(orders, "write its part")
        shares = spread(sizes, self.rank_group.size)
        orders = [DigestOrder(names=names, fingerprints=self.fingerprinted) for names in shares]
        entries: dict[str, ManifestFile] = {}
        for done in self._all(orders, "digest its files"):
            entries |= done.files
            staging.fingerprints.update(done.fingerprints)
        staging.files.update({name: entries[name] for name in sizes})  # in the order of a gathered save

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
        return _succeeded(self.ask(orders, doing))


def agree(
    openings: Sequence[Opening | FailedReply],
    last: AgreedLayout | None,
    options: LeadOptions,
    inventory: Callable[[], frozenset[str] | None],
) -> AgreedLayout:
    """Make the layout of what all ranks hold, or take the last one if nothing has changed.

    Args:
        openings: the ranks', by rank.
        last: the layout that was last agreed on.
        options: rank 0's.
        inventory: returns the names in the base model's checkpoint, None if there is none.

    Raises:
        StepConflictError: ranks are at different steps.
        InvalidWeightsError: what they hold is no version.
        PublishError: a rank could not begin, or asks for something else than rank 0.
        TypeError, ValueError: a rank was called with arguments that cannot be.
    """
    opened: list[Opening] = _succeeded(openings)
    claims: list[list[Claim]] = []
    for rank, opening in enumerate(opened):
        require_alike(rank, opening, opened[0])
        if opening.claims is not None:
            claims.append(opening.claims)
        elif last is not None and last.number == opening.layout:
            claims.append(last.claims[rank])
        else:
            raise StepConflictError(f"rank {rank} refers to an earlier publication that rank 0 knows nothing of")
    if last is None or claims != last.claims:
        layout = lay_out(
            claims,
            inventory=inventory,
            max_shard_bytes=options.max_shard_bytes,
            check_finite=options.check_finite,
        )
        last = AgreedLayout(number=1 if last is None else last.number + 1, claims=claims, layout=layout)
    difference = compare_samples([opening.samples for opening in opened], last.layout.shared)
    if difference is not None:
        raise difference
    return last


class Lead:
    """Rank 0's state from one publication to the next. `publisher` holds the run and commits versions."""

    def __init__(self, rank_group: RankGroup, publisher: WeightPublisher, options: LeadOptions) -> None:
        self.publisher = publisher
        self._rank_group = rank_group
        self._options = options
        self._base = None if options.base_model is None else BaseModel(Path(options.base_model))
        self._agreed: AgreedLayout | None = None
        self._needs_told = set[str]()
        self.shadow_count = ShadowCount()
        self._lent = LentLayout()
        self._receivers = None if options.connection is None else ReceiversQuery(options.connection, options.run)

    def publish(
        self, opening: Opening | FailedReply, follower: Follower, step: int, publish: Callable[..., Any]
    ) -> tuple[Publication, Handed | None]:
        """Lead a publication, and tell all ranks how it ended.

        Args:
            opening: rank 0's own.
            follower: rank 0's own, which carries orders out.
            step: the trainer's.
            publish: publishes content, by a transport where one is asked for; everything else is bound to it.

        Returns:
            The publication, and what came of a transfer, None where none was asked for.
        """
        try:
            openings: list[Opening | FailedReply] = self._rank_group.hear_all(opening, f"come to publish step {step}")
            publication, handed = self._published(openings, follower, publish)
        except ServiceError as error:
            if isinstance(error.publication, Publication):
                self._tell(error.publication, error, None)
            else:
                refuse(self._rank_group, error)
            raise
        except BaseException as error:
            refuse(self._rank_group, error)
            raise
        self._tell(publication, None, handed)
        return publication, handed

    def _published(
        self, openings: Sequence[Opening | FailedReply], follower: Follower, publish: Callable[..., Any]
    ) -> tuple[Publication, Handed | None]:
        content, transport = self._content(openings, follower)
        if transport is None:
            return publish(content), None
        staged: StagedPublication = publish(content, transport=transport)
        return staged.committed(), staged.handed

    def _content(
        self, openings: Sequence[Opening | FailedReply], follower: Follower
    ) -> tuple[Content, Transport | None]:
        """What is to be published, and the transport that the ranks ask for."""
        base = self._base
        inventory: Callable[[], frozenset[str] | None] = (lambda: None) if base is None else base.inventory
        self._agreed = agree(openings, self._agreed, self._options, inventory)
        opened = [each for each in openings if isinstance(each, Opening)]
        transport, route = opened[0].transport, None
        if transport is not None:
            places = [each.place for each in opened if each.place is not None]
            asked = Asked(transport=transport, places=places, durable=DurabilityPolicy.of(opened[0].durable))
            route = route_of_ranks(asked, self._receivers)
        shared = SharedShards(
            root=self._options.root,
            needs_told=self._needs_told,
            lent=self._lent,
            agreed=self._agreed,
            known=[each.layout for each in opened],
            rank_group=self._rank_group,
            answer=follower.answer,
            sender=follower.sender,
            fingerprinted=self._options.fingerprinted,
            shadow_count=self.shadow_count,
            shadow_numbers=[each.shadow for each in opened],
            route=route,
        )
        companions = [] if base is None else base.companions
        return Content(weights=shared, index=index_json(shared.tensors), companions=companions), transport

    def _tell(self, publication: Publication, error: ServiceError | None, handed: Handed | None) -> None:
        notice_error = publication.notice_error
        outcome = PublishedOutcome(
            order=Order(publication.generation, publication.step),
            bytes=publication.bytes,
            digest=publication.digest,
            timings=publication.timings,
            notice=publication.notice,
            notice_error=None if notice_error is None else portable_service_error(notice_error),
            is_refused=error is not None,
            begun=publication.begun,
            handed=handed,
            in_memory=publication.in_memory,
            kind=publication.kind,
            base=publication.base,
            why_full=publication.why_full,
            density=publication.density,
            shadow=self.shadow_count.number,
        )
        try:
            self._rank_group.tell_all([outcome] * self._rank_group.size)
        except RankLostError as lost:  # the version stands; the next publication says which rank is missing
            _log.warning("step %d is published, but not all ranks heard of it: %s", publication.step, lost)


def refuse(rank_group: RankGroup, error: BaseException) -> None:
    """Tell all ranks that nothing was published. Ranks that are gone have been reported already, or will be."""
    if not isinstance(error, Exception):
        rank_group.broken = f"rank 0 was interrupted by {type(error).__name__}"
    with suppress(RankLostError):
        rank_group.tell_all([RefusedOutcome(error=portable(error), broken=rank_group.broken)] * rank_group.size)


def _succeeded(answers: Sequence[Any]) -> list[Any]:
    """The answers of all ranks. Raises the error of the first rank that failed."""
    for rank, answer in enumerate(answers):
        if isinstance(answer, FailedReply):
            told = argument_error_of_rank if answer.is_argument else error_of_rank
            raise told(rank, answer.error) from answer.error
    return list(answers)
