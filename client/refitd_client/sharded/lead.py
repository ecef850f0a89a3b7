"""Rank 0's part of a publication: what all ranks agree on, the files that they fill, and how it ended.

Rank 0 makes the files, has all ranks write and digest them, and commits them as those of one process.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from refitd_client.errors import RankLostError, ServiceError
from refitd_client.publish.attempt import PublishCall
from refitd_client.publish.options import PublishOptions
from refitd_client.publish.publication import Publication
from refitd_client.sharded.agreement import AgreedLayout, agree
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
from refitd_client.sharded.shared_shadows import ShadowCount
from refitd_client.sharded.shared_shards import SharedShards
from refitd_client.write.content import Content
from refitd_client.write.plan import index_json

_log = logging.getLogger("refitd_client")


class RankZeroPublisher(Protocol):
    """What takes the run, and commits what all ranks hold."""

    @property
    def root(self) -> Path:
        """Where the run's folder lies."""
        ...

    def publish(self, weights: Content, call: PublishCall) -> Publication: ...

    def close(self) -> None: ...


class Lead:
    """Rank 0's state from one publication to the next. `publisher` holds the run and commits versions."""

    def __init__(self, rank_group: RankGroup, publisher: RankZeroPublisher, options: PublishOptions) -> None:
        self.publisher = publisher
        self._rank_group = rank_group
        self._options = options
        self._base = options.base()
        self._agreed: AgreedLayout | None = None
        self._needs_told = set[str]()
        self.shadow_count = ShadowCount()
        self._lent = LentLayout()

    def publish(self, opening: Opening | FailedReply, follower: Follower, call: PublishCall) -> Publication:
        """Lead a publication, and tell all ranks how it ended.

        Args:
            opening: rank 0's own.
            follower: rank 0's own, which carries orders out.
            call: what rank 0 asks for.
        """
        try:
            doing = f"come to publish step {call.step}"
            openings: list[Opening | FailedReply] = self._rank_group.hear_all(opening, doing)
            content = self._content(openings, follower)
            publication = self.publisher.publish(content, call).committed()
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

    def _content(self, openings: Sequence[Opening | FailedReply], follower: Follower) -> Content:
        """What is to be published."""
        base = self._base
        inventory: Callable[[], frozenset[str] | None] = (lambda: None) if base is None else base.inventory
        self._agreed = agree(openings, self._agreed, self._options, inventory)
        opened = [each for each in openings if isinstance(each, Opening)]
        shared = SharedShards(
            root=self.publisher.root,
            needs_told=self._needs_told,
            lent=self._lent,
            agreed=self._agreed,
            known=[each.layout for each in opened],
            rank_group=self._rank_group,
            answer=follower.answer,
            sender=follower.sender,
            fingerprinted=self._options.fingerprints,
            shadow_count=self.shadow_count,
            shadow_numbers=[each.shadow for each in opened],
            are_on_gpus=all(each.is_on_gpu for each in opened),
            places=[each.place for each in opened if each.place is not None],
        )
        companions = [] if base is None else base.companions
        return Content(weights=shared, index=index_json(shared.tensors), companions=companions)

    def _tell(self, publication: Publication, error: ServiceError | None) -> None:
        facts = publication.facts
        if facts is not None and facts.notice_error is not None:
            facts = replace(facts, notice_error=portable_service_error(facts.notice_error))
        outcome = PublishedOutcome(
            publication=replace(publication, facts=facts, connection=None),
            error=None if error is None else portable_service_error(error),
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
