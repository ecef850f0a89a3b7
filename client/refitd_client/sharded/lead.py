"""Rank 0's part of a publication: what all ranks agree on, the files that they fill, and how it ended.

Rank 0 makes the files, has all ranks write and digest them, and commits them as a `WeightPublisher` would commit one
process's weights.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from refitd_client.contract.naming import Order
from refitd_client.errors import RankLostError, ServiceError
from refitd_client.http.publisher_client import ReceiversQuery
from refitd_client.publish.publication import Publication, StagedPublication
from refitd_client.publish.publisher import WeightPublisher
from refitd_client.sharded.agreement import AgreedLayout, LeadOptions, agree
from refitd_client.sharded.follower import Follower
from refitd_client.sharded.lending import LentLayout
from refitd_client.sharded.rank_group import (
    FailedReply,
    Opening,
    PublishedOutcome,
    RankGroup,
    RefusedOutcome,
    portable,
    portable_service_error,
)
from refitd_client.sharded.routing import Asked, route_of_ranks
from refitd_client.sharded.shared_shadows import ShadowCount
from refitd_client.sharded.shared_shards import SharedShards
from refitd_client.transport.group.choice import Transport
from refitd_client.write.content import BaseModel, Content
from refitd_client.write.plan import index_json

_log = logging.getLogger("refitd_client")


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
    ) -> Publication:
        """Lead a publication, and tell all ranks how it ended.

        Args:
            opening: rank 0's own.
            follower: rank 0's own, which carries orders out.
            step: the trainer's.
            publish: publishes content, by a transport where one is asked for; everything else is bound to it.
        """
        try:
            openings: list[Opening | FailedReply] = self._rank_group.hear_all(opening, f"come to publish step {step}")
            publication = self._published(openings, follower, publish)
        except ServiceError as error:
            if isinstance(error.publication, Publication):
                self._tell(error.publication, error)
            else:
                refuse(self._rank_group, error)
            raise
        except BaseException as error:
            refuse(self._rank_group, error)
            raise
        self._tell(publication, None)
        return publication

    def _published(
        self, openings: Sequence[Opening | FailedReply], follower: Follower, publish: Callable[..., Any]
    ) -> Publication:
        content, transport = self._content(openings, follower)
        if transport is None:
            return publish(content)
        staged: StagedPublication = publish(content, transport=transport)
        return staged.committed()

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
            asked = Asked(transport=transport, places=places)
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
            are_on_gpus=all(each.is_on_gpu for each in opened),
            route=route,
        )
        companions = [] if base is None else base.companions
        return Content(weights=shared, index=index_json(shared.tensors), companions=companions), transport

    def _tell(self, publication: Publication, error: ServiceError | None) -> None:
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
            handed=publication.handed,
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
