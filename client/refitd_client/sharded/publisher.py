"""Every rank of a trainer publishes its part of one version (`WeightPublisher` with `ranks`).

The ranks open a publisher together: each prepares, rank 0 takes the run, and all raise what fails on one.
"""

import os
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from refitd_client.bucket.objects import is_bucket_url, require_folder
from refitd_client.contract.naming import Order, version_folder
from refitd_client.errors import PublishError, ServiceError
from refitd_client.http.connection import Connection, connect_to
from refitd_client.publish.attempt import PublishCall
from refitd_client.publish.options import PublishOptions
from refitd_client.publish.publication import Publication, Turn
from refitd_client.sharded.follower import Follower
from refitd_client.sharded.holdings import NamingOptions
from refitd_client.sharded.lead import Lead, RankSettings, RankZeroPublisher, refuse, require_same_settings
from refitd_client.sharded.orders import FailedReply, Opening, PublishedOutcome, RankOrder, RankReply, RefusedOutcome
from refitd_client.sharded.rank_group import RankGroup, portable, succeeded
from refitd_client.transport.sending import SEND_SECONDS
from refitd_client.write.content import casts_for

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRank:
    """A rank that could open its publisher. `take` takes the run; rank 0 alone calls it."""

    settings: RankSettings
    take: Callable[[], Lead]


def join(group: RankGroup, prepare: Callable[[], PreparedRank]) -> Lead | None:
    """Prepare each rank, and take the run on rank 0.

    Returns:
        Rank 0's part, on rank 0.

    Raises:
        PublishError: ranks were opened with different settings, or rank 0 cannot take the run.
        RankLostError: a rank is gone, or did not come.
        Exception: what one rank's `prepare` raised, on every rank.
    """
    if group.rank != 0:
        group.tell(_attempted(lambda: prepare().settings))
        if isinstance(answer := group.hear(), RefusedOutcome):
            raise answer.error
        return None
    ready = _attempted(prepare)
    try:
        prepared, *others = succeeded(group.hear_all(ready, "open its publisher"))
        require_same_settings([prepared.settings, *others])
        lead = prepared.take()
    except Exception as error:
        refuse(group, error)
        raise
    group.tell_all([None] * group.size)
    return lead


def _attempted(prepare: Callable[[], T]) -> T | FailedReply:
    """What `prepare` returns; why it does not, as rank 0 is told of arguments that cannot be."""
    try:
        return prepare()
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
        take: Callable[..., RankZeroPublisher],
    ) -> None:
        """Take a run, on all ranks together. Raises as `WeightPublisher`, on every rank.

        `take` makes what takes the run on rank 0, by the first three arguments and options.
        Digests are shared out by file: with more ranks than files some ranks have none to do.
        """
        self._run = run
        self._connection: Connection | None = None
        self._lead: Lead | None = None
        self._rank_group = RankGroup(process_group, options.rank_timeout)  # by it all hear what is wrong on one rank
        self._turn = Turn()
        self._held = ExitStack()
        self._held.callback(self._rank_group.close)
        self._folder: Path
        self._follower: Follower

        def prepare() -> PreparedRank:
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

            def begin() -> Lead:
                plain = replace(options, dtype=None, rename=None, fingerprints=None, shadow="stream")
                publisher = take(root, run, service_url, plain)
                self._held.callback(publisher.close)
                return Lead(self._rank_group, publisher, options)

            return PreparedRank(settings=RankSettings.of(root, run, options.max_shard_bytes), take=begin)

        try:
            self._lead = join(self._rank_group, prepare)
        except BaseException:
            self.close()
            raise

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._rank_group.rank

    def close(self) -> None:
        """As `WeightPublisher.close`."""
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
                opening = self._open(weights, call)
                return self._follow(opening, call.step) if self._lead is None else self._led(self._lead, opening, call)
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

    @contextmanager
    def _call(self) -> Generator[None, None, None]:
        with self._turn.of("publish"):
            try:
                yield
            finally:
                if self._turn.is_ending:
                    self._held.close()
                    self._turn.is_ending = False

    def _open(self, weights: Any, call: PublishCall) -> Opening | FailedReply:
        """What this rank comes with. Arguments that cannot be are told to rank 0, too, because it waits for all."""
        try:
            call = call.checked(self._connection, of_ranks=True)
        except Exception as error:
            return FailedReply(error=portable(error), is_argument=True)
        return self._follower.open(weights, call)

    def _led(self, lead: Lead, opening: Opening | FailedReply, call: PublishCall) -> Publication:
        publication = lead.publish(opening, self._follower, replace(call, sharded=None))
        self._follower.shadow.keep_only(lead.shadow_count.number)
        return publication

    def _follow(self, opening: Opening | FailedReply, step: int) -> Publication:
        reply: Opening | RankReply = opening
        longer = 0.0 if isinstance(opening, FailedReply) or opening.transport is None else SEND_SECONDS
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
                    raise PublishError(f"rank 0 says {other!r} in publishing step {step}: do all ranks run one refitd?")

    def _publication(self, published: PublishedOutcome) -> Publication:
        """The publication as this rank sees it, whose root may be mounted at another path."""
        told = published.publication
        order = Order(told.generation, told.step)
        publication = replace(told, path=self._folder / version_folder(order), connection=self._connection)
        if published.error is not None:
            published.error.publication = publication
            raise published.error
        return publication
