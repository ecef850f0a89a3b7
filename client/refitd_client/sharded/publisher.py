"""`ShardedPublisher`: every rank of a trainer publishes its part of one version."""

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from refitd_client.bucket.address import is_bucket_url, require_folder
from refitd_client.contract.manifest import metadata_texts
from refitd_client.contract.naming import name_patterns, version_folder, version_id, whole_step
from refitd_client.delta.plan import DeltaRules
from refitd_client.errors import PublishError, ServiceError
from refitd_client.http.connection import Connection, connect_to
from refitd_client.publish.attempt import DeltaChoice
from refitd_client.publish.durability import ALWAYS, DurabilityPolicy
from refitd_client.publish.publication import Publication, StagedPublication, Turn
from refitd_client.publish.publisher import WeightPublisher
from refitd_client.sharded.agreement import LeadOptions
from refitd_client.sharded.alike import RankSettings
from refitd_client.sharded.follower import Follower
from refitd_client.sharded.holdings import NamingOptions, Sharded
from refitd_client.sharded.joining import PreparedRank, join
from refitd_client.sharded.lead import Lead
from refitd_client.sharded.lend_orders import LendOrder
from refitd_client.sharded.rank_group import (
    DigestOrder,
    EndOrder,
    FailedReply,
    Opening,
    PublishedOutcome,
    RankGroup,
    RankReply,
    RefusedOutcome,
    SendOrder,
    StageOrder,
    WriteOrder,
    is_timeout,
    portable,
)
from refitd_client.sharded.rank_shadow import RankShadow
from refitd_client.sharded.routing import check_delta, transport_of
from refitd_client.sharded.shadow_orders import CompareOrder, GatherOrder, KeepOrder
from refitd_client.sharded.slot_orders import BlocksOrder, CopyOrder
from refitd_client.transport.group.choice import Transport
from refitd_client.transport.group.sending import SEND_SECONDS
from refitd_client.write.content import BaseModel, casts_for
from refitd_client.write.plan import Rename

if TYPE_CHECKING:
    import torch


class ShardedPublisher:
    """Publishes the versions of one run from all ranks of a trainer, without gathering the weights anywhere.

    Making one, publishing and closing are collective: every rank does them, in the same order.

    >>> with ShardedPublisher("/shared/weights", "exp/trial", "http://127.0.0.1:8700") as publisher:
    ...     publication = publisher.publish(model, step=123)  # FSDP2, HSDP, tensor parallel, DDP, or a mix
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        run: str,
        service_url: str | None = None,
        *,
        process_group: Any = None,
        rank_timeout: float = 300.0,
        dtype: Any = None,
        rename: Rename | None = None,
        base_model: str | os.PathLike[str] | None = None,
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        max_shard_bytes: int | None = None,
        check_finite: bool = True,
        fingerprints: bool | None = None,
        delta_rules: DeltaRules | None = None,
        shadow: Literal["gpu", "stream"] = "stream",
        compress_deltas: bool = False,
        engines: Literal["mine"] | None = None,
        durable: str = ALWAYS,
    ) -> None:
        """Take a run, on all ranks together.

        The files are those that a `WeightPublisher` would write of the gathered state dict. Digests are shared out by
        file: with more ranks than files (16 by default, fewer of a small model) some ranks have none to do.

        Args:
            root: the folder that the service watches, as this rank sees it: one folder of one file system for all.
            run: the run's name, the same on every rank, as is `max_shard_bytes`.
            service_url: the service to send notices to (rank 0 does) and to ask in `wait` (any rank may).
            process_group: the ranks that hold the weights, as a group that can carry CPU tensors (gloo). Without it
                all ranks, in a group of their own.
            rank_timeout: seconds that a rank may come later than the others, or take for its part. One that dies is
                noticed at once.
            dtype: publish floating-point tensors in this dtype (`torch.bfloat16`), or by the first matching pattern of
                a mapping (`{"*.router.*": torch.float32, "*": torch.bfloat16}`) from published names to dtypes.
            rename: published names for the trainer's, as a mapping or a function; None leaves a tensor out. Marks of
                wrappers (`_fsdp_wrapped_module.`, `_orig_mod.`, DDP's `module.`) are taken off before.
            base_model: as for a `WeightPublisher`; with `dtype` each rank reads it.
            token, token_file, max_shard_bytes, check_finite, engines: as for a `WeightPublisher`.
            fingerprints: have each manifest name the tensors' fingerprints, which engines prove it by: the same as of
                the gathered weights. By default where the ranks' GPUs copy into a slot, which is as good as free; else
                ranks compute them of the files that they digest, at about 0.6 GB/s a thread.
            delta_rules: when a delta is worth it, as for a `WeightPublisher`; the same on every rank.
            shadow: where each rank keeps the parts that it compares, as for a `WeightPublisher`.
            compress_deltas: as for a `WeightPublisher`; rank 0's word counts.
            durable: which versions that engines take from memory get files, as for a `WeightPublisher`: `always`,
                `every=N` or `never`. The same on every rank: `publish` refuses anything else.

        Raises:
            PublishError: as for a `WeightPublisher`, on every rank; or ranks do not agree on `root`, `run` or
                `max_shard_bytes`; or torch.distributed is not initialised.
            RankLostError: a rank is gone, or did not come.
            TypeError, ValueError: the URL, the token, a dtype, `shadow`, `durable` or a number cannot be one on a rank:
                the message names it, on every rank.
        """
        self._run = run
        self._connection: Connection | None = None
        self._lead: Lead | None = None
        self._rank_group = RankGroup(process_group, rank_timeout)  # first: by it all hear what is wrong on one rank
        self._turn = Turn()
        self._held = ExitStack()
        self._held.callback(self._rank_group.close)
        self._folder: Path
        self._follower: Follower

        def prepare() -> PreparedRank:
            if shadow not in {"gpu", "stream"}:
                raise ValueError(f"shadow is {shadow!r}: it is 'gpu' or 'stream'")
            if not is_timeout(rank_timeout):
                raise ValueError(f"rank_timeout is {rank_timeout!r}; it is a positive number of seconds")
            if is_bucket_url(os.fspath(root)):
                raise ValueError("ranks publish into a folder; a service there can push it to the store (--push)")
            require_folder(os.fspath(root))
            DurabilityPolicy.of(durable)
            base = None if base_model is None or dtype is None else BaseModel(Path(base_model))
            naming = NamingOptions(casts=casts_for(dtype, base), rename=rename)
            if naming.casts.has_fp8_block:
                raise ValueError("dtype fp8_block takes whole weights: gather them, for a WeightPublisher on one rank")
            if service_url is not None:
                self._connection = connect_to(service_url, token=token, token_file=token_file)
            self._folder = Path(root).absolute() / run
            rank, ranks, rules = self.rank, self._rank_group.size, delta_rules or DeltaRules()
            own = RankShadow(rules, stream=shadow == "stream", check_finite=check_finite)
            self._follower = Follower(
                self._folder, naming, rank, ranks, check_finite=check_finite, shadow=own, durable=durable
            )
            self._held.callback(self._follower.close)
            options = LeadOptions(
                root=Path(root).absolute(),
                run=run,
                connection=self._connection,
                base_model=base_model,
                max_shard_bytes=max_shard_bytes,
                check_finite=check_finite,
                fingerprinted=fingerprints,
            )
            publisher = partial(
                WeightPublisher,
                root,
                run,
                service_url,
                base_model=base_model,
                token=token,
                token_file=token_file,
                max_shard_bytes=max_shard_bytes,
                check_finite=check_finite,
                delta_rules=rules,
                compress_deltas=compress_deltas,
                engines=engines,
                durable=durable,
            )
            return PreparedRank(
                settings=RankSettings.of(root, run, max_shard_bytes),
                take=lambda: Lead(self._rank_group, self._held.enter_context(publisher()), options),
            )

        try:
            self._lead = join(self._rank_group, prepare)
        except BaseException:
            self.close()
            raise

    @property
    def rank(self) -> int:
        """This process's rank in the group. Rank 0 makes the files, commits them and tells the service."""
        return self._rank_group.rank

    def close(self) -> None:
        """Release the run. Publications stay usable. In a signal handler it ends a `publish` as a `WeightPublisher`'s
        does, on all ranks.
        """
        if self._turn.end():
            if self._lead is not None:
                self._lead.publisher.close()  # it ends as well, at once if it has not begun
        else:
            with self._turn.of("close"):
                self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @overload
    def publish(
        self,
        weights: "Mapping[str, Any] | torch.nn.Module",
        *,
        step: int,
        sharded: Mapping[str, Sharded] | None = None,
        metadata: Mapping[str, str] | None = None,
        allow_missing: Sequence[str] = (),
        allow_extra: bool = False,
        delta: DeltaChoice = "never",
    ) -> Publication: ...

    @overload
    def publish(
        self,
        weights: "Mapping[str, Any] | torch.nn.Module",
        *,
        step: int,
        sharded: Mapping[str, Sharded] | None = None,
        metadata: Mapping[str, str] | None = None,
        allow_missing: Sequence[str] = (),
        allow_extra: bool = False,
        transport: Transport,
    ) -> StagedPublication: ...

    @overload
    def publish(
        self,
        weights: "Mapping[str, Any] | torch.nn.Module",
        *,
        step: int,
        sharded: Mapping[str, Sharded] | None = None,
        metadata: Mapping[str, str] | None = None,
        allow_missing: Sequence[str] = (),
        allow_extra: bool = False,
        handover: Literal[True],
    ) -> StagedPublication: ...

    def publish(
        self,
        weights: "Mapping[str, Any] | torch.nn.Module",
        *,
        step: int,
        sharded: Mapping[str, Sharded] | None = None,
        metadata: Mapping[str, str] | None = None,
        allow_missing: Sequence[str] = (),
        allow_extra: bool = False,
        delta: DeltaChoice = "never",
        handover: bool = False,
        transport: Transport | None = None,
    ) -> Publication | StagedPublication:
        """Write this rank's part of a version. Returns when the whole version is committed and the service was told, or
        when all engines have taken it from memory and `durable` wants no files.

        Args:
            weights: the module, or this rank's state dict: DTensors, plain tensors that all ranks hold alike, plain
                parts described in `sharded`, and tensors that only some ranks have (pipeline or expert parallel).
            step: the trainer's step, the same on every rank.
            sharded: which plain tensors are parts of larger ones, by the trainer's names.
            metadata: texts for the manifest and the service; rank 0's count.
            allow_missing: patterns of the names of tensors that the version may lack of those that the engines' model
                has; rank 0's word counts.
            allow_extra: the version may have tensors that the engines' model lacks; rank 0's word counts.
            delta: as for a `WeightPublisher`, the same on every rank: with `auto` each rank looks for what changed in
                its parts, of which it takes a copy, and rank 0 writes all changes.
            handover: the same as `transport="handover"`.
            transport: how engines get it, in place of `delta`, the same on every rank (docs/transports.md): with
                `handover` engines on the ranks' host copy what each rank has from where it lies (docs/handover.md), and
                with `nccl` or `gloo` each rank sends it to the engines' ranks, before the files are written; `auto`
                takes the first of these that can work, else files; `disk` are files, `delta` what changed where that is
                little. Where no engine can receive what is asked for, the version goes by its files, as for a
                `WeightPublisher`. What came of it is the publication's `handed`.

        Returns:
            The same publication on every rank; `wait` on it on one. With `transport` it is a `StagedPublication`, and
            committed, or without files (`committed().in_memory`).

        Raises:
            TransportRefusedError: `nccl` or `gloo` is asked for, engines of the run can receive, and it cannot work
                between them and these ranks.
            PublishError: ranks do not agree on `transport`, `delta`, `delta_rules` or `durable`.
            InvalidWeightsError: what the ranks hold is no version; the message names rank and tensor.
            StepConflictError: ranks are at different steps, or the step cannot be published.
            RankLostError: a rank died or is late. Nothing is visible; open a new publisher on the ranks of a new group.
            NoSpaceError, StorageError: the file system refused a write, on the rank that is named.
            ServiceProblemError: the service refuses the notice. The version is published all the same.
            TypeError, ValueError: a rank's `step`, `metadata`, `delta` or `transport` cannot be one; it names the rank.
        """
        self._rank_group.require_whole()
        with self._call():
            try:
                opening = self._open(weights, step, sharded, metadata, transport, delta, handover=handover)
                if self._lead is not None:
                    publish = partial(
                        self._lead.publisher.publish,
                        step=step,
                        metadata=metadata,
                        allow_missing=name_patterns(allow_missing),
                        allow_extra=allow_extra,
                        delta=delta,
                    )
                    publication = self._lead.publish(opening, self._follower, step, publish)
                    self._follower.shadow.keep_only(self._lead.shadow_count.number)
                else:
                    publication = self._follow(opening, step)
                return StagedPublication.of(publication) if handover or transport is not None else publication
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

    def _open(
        self, weights: Any, step: Any, sharded: Any, metadata: Any, transport: Any, delta: Any, *, handover: bool
    ) -> Opening | FailedReply:
        """What this rank comes with. Arguments that cannot be are told to rank 0, too, because it waits for all."""
        try:
            step = whole_step(step)
            transport = transport_of(transport, self._connection, handover=handover)
            check_delta(delta, transport)
            metadata_texts(metadata)
            sharded = sharded or {}
        except Exception as error:
            return FailedReply(error=portable(error), is_argument=True)
        return self._follower.open(weights, step, sharded, transport, delta)

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
                case WriteOrder() | DigestOrder() | StageOrder() | SendOrder() | EndOrder() | LendOrder() as order:
                    reply = self._follower.answer(order)
                case CopyOrder() | BlocksOrder() | KeepOrder() | CompareOrder() | GatherOrder() as order:
                    reply = self._follower.answer(order)
                case PublishedOutcome() as published:
                    self._follower.shadow.keep_only(published.shadow)
                    return self._publication(published)
                case RefusedOutcome(error=error, broken=broken):
                    self._rank_group.broken = broken
                    raise error
                case other:
                    raise PublishError(f"rank 0 says {other!r} in publishing step {step}: do all ranks run one refitd?")

    def _publication(self, published: PublishedOutcome) -> Publication:
        order, run = published.order, self._run
        publication = Publication(
            run=run,
            generation=order.generation,
            step=order.step,
            path=self._folder / version_folder(order),
            version_id=version_id(run, order),
            bytes=published.bytes,
            digest=published.digest,
            timings=published.timings,
            notice=published.notice,
            kind=published.kind,
            base=published.base,
            why_full=published.why_full,
            density=published.density,
            connection=self._connection,
            notice_error=published.notice_error,
            begun=published.begun,
            in_memory=published.in_memory,
            handed=published.handed,
        )
        if published.notice_error is not None and published.is_refused:
            published.notice_error.publication = publication
            raise published.notice_error
        return publication
