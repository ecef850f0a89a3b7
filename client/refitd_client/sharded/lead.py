"""Rank 0's part of a publication: what all ranks agree on, and what they are told of how it ended."""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refitd_client.contract.naming import Order
from refitd_client.errors import RankLostError, ServiceError, StepConflictError
from refitd_client.publish.publication import Publication
from refitd_client.publish.publisher import WeightPublisher
from refitd_client.sharded import blame, samples
from refitd_client.sharded.claims import Claim
from refitd_client.sharded.layout import lay_out
from refitd_client.sharded.messages import Failed, Opening, Published, Refused
from refitd_client.sharded.rank_group import RankGroup
from refitd_client.sharded.shared_shards import Answer, Planned, SharedShards
from refitd_client.write.base_model import BaseModel
from refitd_client.write.content import Content
from refitd_client.write.plan import index_json

_log = logging.getLogger("refitd_client")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeadOptions:
    """What only rank 0 needs to know."""

    base_model: str | os.PathLike[str] | None
    max_shard_bytes: int | None
    check_finite: bool
    fingerprinted: bool


def agree(
    openings: Sequence[Opening | Failed],
    last: Planned | None,
    options: LeadOptions,
    inventory: Callable[[], frozenset[str] | None],
) -> Planned:
    """Make the layout of what all ranks brought, or take the last one if nothing has changed.

    Raises:
        StepConflictError: ranks are at different steps.
        InvalidWeightsError: what they hold is no version.
        PublishError: a rank could not begin.
    """
    opened = _opened(openings)
    for rank, opening in enumerate(opened):
        if opening.step != opened[0].step:
            raise StepConflictError(
                f"rank {rank} publishes step {opening.step} and rank 0 step {opened[0].step}: all ranks publish the "
                "same step"
            )
    claims = [_claims(opening, rank, last) for rank, opening in enumerate(opened)]
    if last is None or claims != last.claims:
        layout = lay_out(
            claims,
            inventory=inventory,
            max_shard_bytes=options.max_shard_bytes,
            check_finite=options.check_finite,
        )
        last = Planned(number=1 if last is None else last.number + 1, claims=claims, layout=layout)
    difference = samples.compare([opening.samples for opening in opened], last.layout.shared)
    if difference is not None:
        raise difference
    return last


class Lead:
    """Rank 0 from one publication to the next."""

    def __init__(self, rank_group: RankGroup, publisher: WeightPublisher, options: LeadOptions) -> None:
        """`publisher` holds the run; it commits what all ranks write as it would commit one process's weights."""
        self.publisher = publisher
        self._rank_group = rank_group
        self._options = options
        self._base = None if options.base_model is None else BaseModel(Path(options.base_model))
        self._planned: Planned | None = None

    def publish(
        self, opening: Opening | Failed, answer: Answer, step: int, publish: Callable[[Any], Publication]
    ) -> Publication:
        """Lead a publication, and tell all ranks how it ended. `publish` wants nothing more than the weights."""
        try:
            openings: list[Opening | Failed] = self._rank_group.hear_all(opening, f"come to publish step {step}")
            content = self._content(openings, answer)
            publication = publish(content)
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

    def _content(self, openings: Sequence[Opening | Failed], answer: Answer) -> Content:
        inventory = _nobody if self._base is None else self._base.inventory
        planned = self._planned = agree(openings, self._planned, self._options, inventory)
        known = [each.layout for each in openings if isinstance(each, Opening)]
        shared = SharedShards(
            planned=planned,
            known=known,
            rank_group=self._rank_group,
            answer=answer,
            fingerprinted=self._options.fingerprinted,
        )
        companions = self._base.companions if self._base is not None else []
        return Content(weights=shared, index=index_json(shared.tensors), companions=companions)

    def _tell(self, publication: Publication, error: ServiceError | None) -> None:
        notice_error = publication.notice_error
        published = Published(
            order=Order(publication.generation, publication.step),
            bytes=publication.bytes,
            digest=publication.digest,
            timings=publication.timings,
            notice=publication.notice,
            notice_error=None if notice_error is None else blame.as_service_error(notice_error),
            is_refused=error is not None,
            begun=publication.begun,
        )
        try:
            self._rank_group.tell_all([published] * self._rank_group.size)
        except RankLostError as lost:  # the version stands; the next publication says who is missing
            _log.warning("step %d is published, but not all ranks heard of it: %s", publication.step, lost)


def refuse(rank_group: RankGroup, error: BaseException) -> None:
    """Tell all ranks that nothing was published. Those who are gone have been missed already, or will be."""
    if not isinstance(error, Exception):
        rank_group.broken = f"rank 0 was interrupted by {type(error).__name__}"
    with suppress(RankLostError):
        rank_group.tell_all([Refused(error=blame.portable(error), broken=rank_group.broken)] * rank_group.size)


def _opened(openings: Sequence[Opening | Failed]) -> list[Opening]:
    opened: list[Opening] = []
    for rank, opening in enumerate(openings):
        if isinstance(opening, Failed):
            raise blame.of_rank(rank, opening.error) from opening.error
        opened.append(opening)
    return opened


def _claims(opening: Opening, rank: int, last: Planned | None) -> list[Claim]:
    if opening.claims is not None:
        return opening.claims
    if last is None or last.number != opening.layout:
        raise StepConflictError(f"rank {rank} refers to an earlier publication that rank 0 knows nothing of")
    return last.claims[rank]


def _nobody() -> None:
    return None
