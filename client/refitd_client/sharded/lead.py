"""Rank 0's part of a publication: what all ranks agree on, the files that they fill, and how it ended.

Rank 0 makes the files, has all ranks write and digest them, and commits them as those of one process.
"""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, Self

from refitd_client.errors import PublishError, RankLostError, ServiceError, StepConflictError
from refitd_client.http.publisher_client import root_name
from refitd_client.publish.attempt import PublishCall
from refitd_client.publish.options import PublishOptions
from refitd_client.publish.publication import Publication
from refitd_client.sharded.follower import Follower
from refitd_client.sharded.holdings import compare_samples
from refitd_client.sharded.layout import AgreedLayout, Claim, lay_out
from refitd_client.sharded.orders import FailedReply, Opening, PublishedOutcome, RefusedOutcome
from refitd_client.sharded.rank_group import RankGroup, portable, portable_service_error, succeeded
from refitd_client.sharded.shared_export import LentLayout
from refitd_client.sharded.shared_shards import ShadowCount, SharedShards
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
        """Lead a publication, and tell all ranks how it ended."""
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
            export=follower.export,
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


def agree(
    openings: Sequence[Opening | FailedReply],
    last: AgreedLayout | None,
    options: PublishOptions,
    inventory: Callable[[], frozenset[str] | None],
) -> AgreedLayout:
    """Make the layout of what all ranks hold, or take the last one if nothing has changed.

    Raises:
        StepConflictError: ranks are at different steps.
        InvalidWeightsError: what they hold is no version.
        PublishError: a rank could not begin, or asks for something else than rank 0.
        TypeError, ValueError: a rank was called with arguments that cannot be.
    """
    opened: list[Opening] = succeeded(openings)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """What a rank opens its publisher with, as far as all ranks have to agree.

    Hosts may have mounted one folder at different places: `marks` of the root are alike wherever it is seen.
    """

    run: str
    root: str
    marks: frozenset[str]
    max_shard_bytes: int | None

    @classmethod
    def of(cls, root: str | os.PathLike[str], run: str, max_shard_bytes: int | None) -> Self:
        """Those of a rank that was given these arguments."""
        path = Path(root).absolute()
        return cls(run=run, root=str(path), marks=_marks(path), max_shard_bytes=max_shard_bytes)


def require_same_settings(ranks: Sequence[RankSettings]) -> None:
    """Hold what each rank was opened with against rank 0.

    Raises:
        PublishError: one was opened with something else.
    """
    first = ranks[0]
    for rank, settings in enumerate(ranks):
        for name in ("run", "root", "max_shard_bytes"):
            its, firsts = getattr(settings, name), getattr(first, name)
            if its != firsts and not (name == "root" and settings.marks & first.marks):
                raise PublishError(
                    f"rank {rank} was opened with {name}={its!r} and rank 0 with {firsts!r}: all ranks are opened with "
                    f"{'one folder' if name == 'root' else 'the same'}"
                )


def require_alike(rank: int, opening: Opening, first: Opening) -> None:
    """Hold what a rank asks for against what rank 0 does.

    Raises:
        StepConflictError: it is at another step. PublishError: it asks for something else than rank 0.
    """
    if opening.step != first.step:
        raise StepConflictError(
            f"rank {rank} publishes step {opening.step} and rank 0 step {first.step}: all ranks publish the same step"
        )
    for name in ("transport", "durable", "delta_rules"):
        mine, its = getattr(opening, name), getattr(first, name)
        if mine != its:
            raise PublishError(
                f"rank {rank} asks for {name}={mine!r} and rank 0 for {its!r}: all ranks ask for the same"
            )


def _marks(root: Path) -> frozenset[str]:
    """What a folder is recognised by under another path: its number in its file system, and its root's name if it has
    one; nothing where it is not there yet.
    """
    try:
        number = root.stat().st_ino
    except OSError:
        return frozenset()
    name = root_name(root)
    return frozenset({str(number), name} if name else {str(number)})
