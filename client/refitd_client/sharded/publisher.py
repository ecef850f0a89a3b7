"""Every rank of a trainer publishes its part of one version (`WeightPublisher` with `ranks`).

The ranks open a publisher together: each prepares, rank 0 takes the run, and all raise what fails on one. In a
publication rank 0 makes the files, has all ranks write and digest them, and commits them as those of one process.
"""

import logging
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from refitd_client.contract.naming import Order, version_folder
from refitd_client.contract.stores import is_bucket_url, require_folder
from refitd_client.errors import PublishError, RankLostError, ServiceError, StepConflictError
from refitd_client.http.connection import Connection, connect_to
from refitd_client.http.publisher_client import root_name
from refitd_client.publish.attempt import PublishCall
from refitd_client.publish.options import PublishOptions
from refitd_client.publish.publication import Publication, Turn
from refitd_client.sharded.follower import Follower
from refitd_client.sharded.holdings import NamingOptions, compare_samples
from refitd_client.sharded.layout import AgreedLayout, Claim, lay_out
from refitd_client.sharded.orders import (
    FailedReply,
    Opening,
    PublishedOutcome,
    RankOrder,
    RankReply,
    RefusedOutcome,
    SourceOpening,
    SourceOrder,
)
from refitd_client.sharded.rank_group import RankGroup, portable, portable_service_error, succeeded
from refitd_client.sharded.shared_shards import LeadState, SharedShards
from refitd_client.transport.sending import SEND_SECONDS
from refitd_client.write.content import Content, casts_for
from refitd_client.write.plan import index_json

_log = logging.getLogger("refitd_client")
T = TypeVar("T")


class Lead:
    """Rank 0's part. `publisher` holds the run and commits versions, as for one process."""

    def __init__(self, publisher: Any, rank_group: RankGroup, follower: Follower, options: PublishOptions) -> None:
        self.publisher = publisher
        self.state = LeadState(publisher.root, rank_group, follower)
        self._options = options
        self._base = options.base()
        self._agreed: AgreedLayout | None = None

    def publish(self, opening: Opening | SourceOpening | FailedReply, call: PublishCall) -> Publication:
        """Lead a publication, and tell all ranks how it ended."""
        group = self.state.rank_group
        try:
            content = self._content(self._openings(group.hear_all(opening, f"come to publish step {call.step}")))
            publication = self.publisher.publish(content, call).committed()
        except BaseException as error:
            if isinstance(error, ServiceError) and isinstance(error.publication, Publication):
                self._tell(error.publication, error)
            else:
                refuse(group, error)
            raise
        self._tell(publication, None)
        return publication

    def _openings(self, came: Sequence[Opening | SourceOpening | FailedReply]) -> Sequence[Opening | FailedReply]:
        """What all ranks hold. Where they come with sources, all read theirs first, and keep a share each.

        Raises:
            PublishError: a rank could not begin, or some come with a source and some do not.
            InvalidWeightsError: their sources do not make up one model.
        """
        begun: list[Opening | SourceOpening] = succeeded(came)
        opened = [each for each in begun if isinstance(each, Opening)]
        words = [each.word for each in begun if isinstance(each, SourceOpening)]
        if not words:
            return opened
        if opened:
            some = f"{len(words)} of {len(begun)} ranks pass a source of weights"
            raise PublishError(f"{some}, and the others do not: either all of them do, or none")
        group, follower = self.state.rank_group, self.state.follower
        reading, _ = follower.source
        asked = [SourceOrder(share=share) for share in reading.shares(words)]
        group.tell_all(asked, are_orders=True)
        return group.hear_all(follower.answer(asked[0]), "read its source")

    def _content(self, openings: Sequence[Opening | FailedReply]) -> Content:
        base = self._base
        inventory: Callable[[], frozenset[str] | None] = (lambda: None) if base is None else base.inventory
        self._agreed = agree(openings, self._agreed, self._options, inventory)
        opened = [each for each in openings if isinstance(each, Opening)]
        shared = SharedShards(
            lead=self.state,
            agreed=self._agreed,
            opened=opened,
            known=[each.layout for each in opened],
            fingerprinted=self._options.fingerprints,
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
            shadow=self.state.shadow_count.number,
        )
        try:
            self.state.rank_group.tell_all([outcome] * self.state.rank_group.size)
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
        path = Path(root).absolute()
        return cls(run=run, root=str(path), marks=_marks(path), max_shard_bytes=max_shard_bytes)


def require_same_settings(ranks: Sequence[RankSettings]) -> None:
    """Hold what each rank was opened with against rank 0. Raises PublishError: one was opened with something else."""
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
    """Hold what a rank asks for against what rank 0 does. Raises StepConflictError: it is at another step.
    PublishError: it asks for something else than rank 0.
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


def _attempted(do: Callable[[], T]) -> T | FailedReply:
    """The result, or why there is none: rank 0 waits for all ranks, so it gets the fault of arguments too."""
    try:
        return do()
    except Exception as error:
        return FailedReply(error=portable(error), is_argument=True)


class RankPublisher:
    """This rank's part. Making one, publishing and closing are collective."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        run: str,
        service_url: str | None,
        process_group: Any,
        options: PublishOptions,
        *,
        take: Callable[..., Any],
    ) -> None:
        """Take a run, on all ranks together. Raises as `WeightPublisher`, on every rank.

        `take` makes the publisher of one process, which takes the run on rank 0, by the first three arguments and
        options.
        """
        self._connection: Connection | None = None
        self._lead: Lead | None = None
        self._rank_group = RankGroup(process_group, options.rank_timeout)  # by it all hear what is wrong on one rank
        self._turn = Turn()
        self._held = ExitStack()
        self._held.callback(self._rank_group.close)
        self._folder: Path
        self._follower: Follower

        def prepare() -> RankSettings:
            options.check(service_url)
            if is_bucket_url(os.fspath(root)):
                raise ValueError("ranks publish into a folder; a service there can push it to the store (--push)")
            require_folder(os.fspath(root))
            base = None if options.dtype is None else options.base()
            naming = NamingOptions(casts=casts_for(options.dtype, base), rename=options.rename)
            if naming.casts.has_fp8_block:
                raise ValueError("dtype fp8_block takes whole weights: gather them, and publish from one process")
            if service_url is not None:
                self._connection = connect_to(service_url, token=options.token, token_file=options.token_file)
            self._folder = Path(root).absolute() / run
            self._follower = Follower(self._folder, naming, self.rank, self._rank_group.size, options)
            self._held.callback(self._follower.close)
            return RankSettings.of(root, run, options.max_shard_bytes)

        def take_run() -> Lead:
            plain = replace(options, dtype=None, rename=None, fingerprints=None, shadow="stream")
            publisher = take(root, run, service_url, plain)
            self._held.callback(publisher.close)
            return Lead(publisher, self._rank_group, self._follower, options)

        try:
            self._lead = self._join(_attempted(prepare), take_run)
        except BaseException:
            self.close()
            raise

    def _join(self, mine: RankSettings | FailedReply, take_run: Callable[[], Lead]) -> Lead | None:
        """Hold the ranks' settings against each other, and take the run on rank 0. Raises what fails on one rank."""
        group = self._rank_group
        if self.rank != 0:
            group.tell(mine)
            if isinstance(answer := group.hear(), RefusedOutcome):
                raise answer.error
            return None
        try:
            require_same_settings(succeeded(group.hear_all(mine, "open its publisher")))
            lead = take_run()
        except Exception as error:
            refuse(group, error)
            raise
        group.tell_all([None] * group.size)
        return lead

    @property
    def rank(self) -> int:
        return self._rank_group.rank

    def close(self) -> None:
        if self._turn.end():
            if self._lead is not None:
                self._lead.publisher.close()  # it ends as well, at once if it has not begun
        else:
            with self._turn.of("close"):
                self._held.close()

    def begins(self, step: int) -> str | None:
        """Refuse: it would be collective. Raises PublishError."""
        raise PublishError(f"whether step {step} begins a generation is known when all ranks publish it: see `begun`")

    def publish(self, weights: Any, call: PublishCall) -> Publication:
        """Publish this rank's part, as `WeightPublisher.publish` does."""
        self._rank_group.require_whole()
        with self._call():
            try:
                return self._published(weights, call)
            except Exception as error:
                self._follower.forget()
                is_published = isinstance(error, ServiceError) and error.publication is not None
                if not is_published:
                    self._follower.shadow.drop()
                raise
            except BaseException:  # an interrupt: this rank answers no more, and the others must not go on with it
                self._rank_group.broken = f"rank {self.rank} was interrupted in a publication"
                self._follower.forget()
                raise
            finally:
                self._follower.release()

    def _published(self, weights: Any, call: PublishCall) -> Publication:
        checked = _attempted(lambda: call.checked(self._connection, of_ranks=True))
        if isinstance(checked, FailedReply):
            opening: Opening | SourceOpening | FailedReply = checked
        else:
            opening, call = self._follower.open(weights, checked), checked
        if self._lead is None:
            return self._follow(opening, call)
        publication = self._lead.publish(opening, replace(call, sharded=None))
        self._follower.shadow.keep_only(self._lead.state.shadow_count.number)
        return publication

    @contextmanager
    def _call(self) -> Generator[None, None, None]:
        with self._turn.of("publish"):
            try:
                yield
            finally:
                if self._turn.is_ending:
                    self._held.close()
                    self._turn.is_ending = False

    def _follow(self, opening: Opening | SourceOpening | FailedReply, call: PublishCall) -> Publication:
        reply: SourceOpening | RankReply = opening
        longer = 0.0 if isinstance(opening, FailedReply) or call.transport is None else SEND_SECONDS
        while True:
            try:
                self._turn.require_open()
            except PublishError as error:
                reply = FailedReply(error=error)  # ends it on all ranks
            self._rank_group.tell(reply, longer)
            match self._rank_group.hear(longer):
                case PublishedOutcome() as published:
                    self._follower.shadow.keep_only(published.shadow)
                    return self._publication(published)
                case RefusedOutcome(error=error, broken=broken):
                    self._rank_group.broken = broken
                    raise error
                case order if isinstance(order, RankOrder):
                    reply = self._follower.answer(order)
                case other:
                    raise PublishError(
                        f"rank 0 says {other!r} in publishing step {call.step}: do all ranks run one refitd?"
                    )

    def _publication(self, published: PublishedOutcome) -> Publication:
        """The publication as this rank sees it, whose root may be mounted at another path."""
        told = published.publication
        order = Order(told.generation, told.step)
        publication = replace(told, path=self._folder / version_folder(order), connection=self._connection)
        if published.error is not None:
            published.error.publication = publication
            raise published.error
        return publication
