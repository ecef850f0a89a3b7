"""The trainer's side: weights become a version on disk, whole or not at all, and a notice goes to the service.

    <root>/<run>/.incoming-…/   model-0000i-of-0000N.safetensors, each synced
                                model.safetensors.index.json, after the shards
                                config.json, tokenizer files
                                refit.json, the manifest: every file's size and digest; sync of the folder
    <root>/<run>/.publisher.json   the generation and step, so that neither is ever used again
    <root>/<run>/v000123/       by rename; sync of the parent; then the notice

Wherever a trainer is stopped: a version is there, complete and synced, or it is not there at all.

If the service hands the files of old versions back, `.incoming-…` is one of these slots and its shards are written in
place: see `refitd_client.contract.naming`. With `block="staged"` the trainer goes on as soon as the tensors' bytes are
in the files; the rest is done by one thread, in order.
"""

import logging
import os
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from refitd_client.contract.manifest import metadata_texts
from refitd_client.contract.naming import Order, name_patterns, whole_step
from refitd_client.delta.maker import DeltaMaker, ask_base
from refitd_client.delta.plan import DeltaRules
from refitd_client.errors import RefitError
from refitd_client.files.durable import Mappings
from refitd_client.http.connection import connect_to
from refitd_client.http.publisher_client import ReceiversQuery, newest_known
from refitd_client.publish.attempt import DeltaChoice, PublishAttempt, PublisherContext
from refitd_client.publish.bucket_target import KEEP, begun_target, bucket_at, spool_folder
from refitd_client.publish.closing import release
from refitd_client.publish.durability import DurabilityPolicy
from refitd_client.publish.publication import Background, Publication, StagedPublication, Turn
from refitd_client.publish.route import route_of
from refitd_client.publish.run_folder import RunFolder
from refitd_client.publish.tracing import PublishTrace
from refitd_client.transport.group.choice import Transport
from refitd_client.transport.handover import Handed
from refitd_client.write.content import BaseModel, WeightsReader, casts_for, fp8_blocks
from refitd_client.write.plan import Rename
from refitd_client.write.version_folder import Progress

if TYPE_CHECKING:
    import torch

    TrainerWeights = Mapping[str, Any] | torch.nn.Module | str | os.PathLike[str]

_log = logging.getLogger("refitd_client")
DUE = Handed(reason="the files of what was handed over before were never written: these come first")
"""The result of a hand-over that was not made."""


class WeightPublisher:
    """Publishes the versions of one run. One at a time: the run stays locked until `close`, or the process ends.

    >>> with WeightPublisher("/shared/weights", "exp/trial", "http://127.0.0.1:8700") as publisher:
    ...     publisher.publish(model, step=123).wait()
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        run: str,
        service_url: str | None = None,
        *,
        base_model: str | os.PathLike[str] | None = None,
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        max_shard_bytes: int | None = None,
        check_finite: bool = True,
        dtype: Any = None,
        rename: Rename | None = None,
        fingerprints: bool | None = None,
        delta_rules: DeltaRules | None = None,
        shadow: Literal["gpu", "stream"] = "stream",
        compress_deltas: bool = False,
        engines: Literal["mine"] | None = None,
        keep: int = KEEP,
        durable: str = "always",
    ) -> None:
        """Take a run.

        Args:
            root: the folder that the service watches; made if it is not there. Or an object store's URL, such as
                `s3://bucket/prefix`, which services follow; then there is no `service_url` (docs/object-stores.md).
            run: the run's name, such as `experiment/trial`.
            service_url: the service to send notices to, or those of a group, separated by commas; without it the
                service finds versions by watching the root.
            base_model: a model's folder, whose configuration and tokenizer files go into each version, and whose
                tensors' names decide which names of tied weights are written. A `dtype` for all tensors leaves each in
                the dtype that this model has it in, such as a router's bias in float32.
            token: the bearer token; else `token_file`, `REFITD_TOKEN`, `REFITD_TOKEN_FILE`.
            token_file: holds the token, and is read again for each request.
            max_shard_bytes: tensors are cut into files of at most so many bytes; by default into about 16 files of
                64 MB to 5 GB, which several threads write and digest.
            check_finite: refuse tensors with NaN or infinity. Checkpoints in folders are left to the service to check.
            dtype: publish floating-point tensors in this dtype (`torch.bfloat16`), or by the first matching pattern of
                a mapping (`{"*.router.*": torch.float32, "*": torch.bfloat16}`) from published names to dtypes.
                With `"fp8_block"` linear layers' weights are quantised for engines that serve fp8 in blocks
                (docs/publishing.md). Folders are published as they are, and refused with an option that would do
                nothing to them: `dtype`, `rename`, `fingerprints`, `max_shard_bytes`, `check_finite=False`, `shadow`,
                `durable`, and of an adapter `base_model`.
            rename: published names for the trainer's, as a mapping or a function; None leaves a tensor out. Marks of
                wrappers (`_fsdp_wrapped_module.`, `_orig_mod.`, DDP's `module.`) are taken off before, and a module of
                transformers has the names of its checkpoint by then, as `save_pretrained` would write them.
            fingerprints: have each full version's manifest name the tensors' fingerprints, which engines prove it by.
                By default where all tensors are on GPUs, which compute them as good as for free; processors do 0.6 GB/s
                a thread. With deltas they are named in any case; of checkpoints in folders never.
            delta_rules: when a delta is worth it, for `publish(..., delta="auto")`.
            shadow: where the weights published last are kept, for deltas of tensors on a GPU: on the GPU (`gpu`, as
                much memory again), or in host memory, from where they are streamed over the bus (`stream`).
            compress_deltas: zstd makes them half as large, for a slow network, and slower to make.
            engines: with `mine` the service brings engines to this run while none follows it: those that follow no run,
                and those of runs that are closed (`RefitClient.close_run`). Engines of a run that is not closed stay
                there. Needs `service_url`.
            keep: how many of the newest versions stay in an object store, besides the bases that they need. In a root
                the service collects.
            durable: which versions that engines take from memory get files: `always`, `every=N` (the first and then
                one of N) or `never` (docs/transports.md). An engine that restarts goes back to the newest with files.

        Raises:
            NameRefusedError: the run's name is no safe relative one.
            RunBusyError: another publisher has the run.
            PublishError: `base_model` is no model's folder, or quantised in another way than `dtype` says, or the run's
                record is damaged.
            StorageError: the run's folder cannot be made, read or locked.
            ConflictError: there is no such folder, and the service, which answers, watches another one.
            BucketError: the object store cannot be reached, refuses, or does not keep conditions of writes.
            ValueError: a URL, the token, a dtype, `shadow`, `engines`, `durable` or `max_shard_bytes` cannot be one.
        """
        if max_shard_bytes is not None and max_shard_bytes <= 0:
            raise ValueError(f"max_shard_bytes is {max_shard_bytes}; a shard takes at least one byte")
        if shadow not in {"gpu", "stream"}:
            raise ValueError(f"shadow is {shadow!r}: it is 'gpu' or 'stream'")
        if engines not in {None, "mine"}:
            raise ValueError(f"engines is {engines!r}: it is 'mine', or None")
        if engines is not None and service_url is None:
            raise ValueError("engines='mine' needs the service_url of the service that has the engines")
        self._durability = DurabilityPolicy.of(durable)
        base = BaseModel(Path(base_model)) if base_model is not None else None
        rules = casts_for(dtype, base)
        reader = WeightsReader(
            base_model=base,
            max_shard_bytes=max_shard_bytes,
            check_finite=check_finite,
            casts=rules,
            rename=rename,
            fingerprinted=fingerprints,
            blocks=fp8_blocks(rules, base),
            given={
                "dtype": dtype,
                "rename": rename,
                "max_shard_bytes": max_shard_bytes,
                "fingerprints": fingerprints,
                "check_finite": check_finite,
                "shadow": shadow,
                "durable": durable,
                "base_model": base_model,
            },
        )
        connection = None if service_url is None else connect_to(service_url, token=token, token_file=token_file)
        self._receivers = None if connection is None else ReceiversQuery(connection, run)
        bucket = bucket_at(root, service_url, keep)
        if bucket is None and not Path(root).is_dir():
            newest_known(connection, run, Path(root).absolute())  # before a folder is made beside the service's root
        self._folder = RunFolder(Path(root).absolute() if bucket is None else spool_folder(bucket.name), run)
        self._folder.remove_dead()
        target = None if bucket is None else begun_target(bucket, self._folder, keep)
        make_deltas = partial(
            DeltaMaker,
            delta_rules or DeltaRules(),
            partial(ask_base, connection, run) if target is None else target.base,
            stream=shadow == "stream",
            compress=compress_deltas,
        )
        self._turn = Turn()
        self._background = Background()
        self._context = PublisherContext(
            folder=self._folder,
            reader=reader,
            make_deltas=make_deltas,
            mappings=Mappings(),
            connection=connection,
            engines=engines,
            bucket=target,
        )
        self._finalizer = weakref.finalize(self, release, self._background.begun, self._context)
        self._finalizer.atexit = False  # the end of the process gives everything back

    def close(self) -> None:
        """Finish what is under way, and unlock the run. Publications stay usable.

        In a signal handler, or in `progress`, it has a `publish` that it interrupts end with a PublishError, leave
        nothing behind and unlock the run. It returns before that.

        Raises:
            PublishError, ServiceProblemError: a publication failed in the background, and no call has raised that yet.
        """
        if not self._turn.end():
            with self._call("close"):
                self._give_back()

    def _give_back(self) -> None:
        try:
            self._background.close()
        finally:
            self._finalizer()

    @contextmanager
    def _call(self, name: str) -> Generator[None, None, None]:
        self._background.require_other_thread(name)
        with self._turn.of(name):
            try:
                yield
            finally:
                if self._turn.is_ending:
                    try:
                        self._give_back()
                    except RefitError as error:
                        _log.warning("a publication has failed as well: %s", error)  # what is being raised came first
                    self._turn.is_ending = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except RefitError as error:
            if kind is None:
                raise
            _log.warning("a publication has failed as well: %s", error)  # what is being raised came first

    def begins(self, step: int) -> str | None:
        """A sentence if publishing this step now would begin a generation of the run; None if it would not.

        Raises:
            StepConflictError, NameRefusedError: the step cannot be published.
            PublishError: this publisher is closed, or a signal handler calls this in the middle of another call.
        """
        with self._call("begins"):
            return self._folder.begun(self._placed(whole_step(step)))

    @overload
    def publish(
        self,
        weights: "TrainerWeights",
        *,
        step: int,
        metadata: Mapping[str, str] | None = None,
        allow_missing: Sequence[str] = (),
        allow_extra: bool = False,
        progress: Callable[[Progress], None] | None = None,
        delta: DeltaChoice = "never",
        block: Literal["committed"] = "committed",
    ) -> Publication: ...

    @overload
    def publish(
        self,
        weights: "TrainerWeights",
        *,
        step: int,
        metadata: Mapping[str, str] | None = None,
        allow_missing: Sequence[str] = (),
        allow_extra: bool = False,
        progress: Callable[[Progress], None] | None = None,
        delta: DeltaChoice = "never",
        block: Literal["staged"],
    ) -> StagedPublication: ...

    @overload
    def publish(
        self,
        weights: "TrainerWeights",
        *,
        step: int,
        metadata: Mapping[str, str] | None = None,
        allow_missing: Sequence[str] = (),
        allow_extra: bool = False,
        progress: Callable[[Progress], None] | None = None,
        handover: Literal[True],
    ) -> StagedPublication: ...

    @overload
    def publish(
        self,
        weights: "TrainerWeights",
        *,
        step: int,
        metadata: Mapping[str, str] | None = None,
        allow_missing: Sequence[str] = (),
        allow_extra: bool = False,
        progress: Callable[[Progress], None] | None = None,
        transport: Transport,
    ) -> StagedPublication: ...

    def publish(
        self,
        weights: "TrainerWeights",
        *,
        step: int,
        metadata: Mapping[str, str] | None = None,
        allow_missing: Sequence[str] = (),
        allow_extra: bool = False,
        progress: Callable[[Progress], None] | None = None,
        delta: DeltaChoice = "never",
        block: Literal["committed", "staged"] = "committed",
        handover: bool = False,
        transport: Transport | None = None,
    ) -> Publication | StagedPublication:
        """Write a version, commit it and send the notice. Returns when it is on stable storage.

        With `block="staged"` it returns when the tensors may be changed; checks, digests, syncs, commit and notice go
        on in a thread of the publisher's. What fails there is raised by the publication's `wait` or `committed`, or by
        the next call, which waits for the end of the one before it; then nothing of the new step has been written.

        A folder's files are cloned or copied, never linked: nothing that the trainer does to its own files or tensors
        afterwards changes a version. A first step that is not above the last of the run begins a new generation, which
        is logged as a warning. The last step is known from the run's folder and from the service, which remembers
        deleted versions.

        Args:
            weights: a state dict of torch tensors or numpy arrays, an `nn.Module` (its parameters and persistent
                buffers), or the path of a checkpoint's folder with `*.safetensors`.
            step: the trainer's step, above the last that this publisher published.
            metadata: texts for the manifest and the service, by keys that are texts.
            allow_missing: patterns of the names of tensors that the version may lack of those that the engines' model
                has, such as `mtp.*`: engines keep their start-up weights of those. Without it such a version is
                rejected.
            allow_extra: the version may have tensors that the engines' model lacks. Without it such a version is
                rejected.
            progress: is called with how far writing is, in this thread.
            delta: with `auto`, only what changed since the version that engines serve is written, where there is one,
                and little changed; the publication's `why_full` says why not. Takes a copy of the weights. A delta is
                staged like a full version.
            block: `committed` or `staged`.
            handover: engines on this host with refitd's plugin copy the tensors from where they are (docs/handover.md).
                Returns when those have answered, 20 s at most, and the bytes are staged: the tensors may be changed.
                What came of it is the publication's `handed`. Its files follow as with `staged`. After one whose files
                could not be written the next goes by its files.
            transport: how engines get it, in place of `delta` and `handover` (docs/transports.md): `auto` takes the
                fastest that can work between this trainer and the run's engines; `disk`, `delta`, `handover`, `nccl`
                and `gloo` ask for one. Where no engine of the run can receive what is asked for, as without refitd
                inside, the version goes by its files. The publication's `handed` and the version's metadata say which
                was taken, and why.

        Raises:
            InvalidWeightsError: the weights cannot be a version; the message names the tensor or file.
            TransportRefusedError: `nccl` or `gloo` is asked for, engines of the run can receive, and it cannot work
                between them and this trainer.
            StepConflictError, NameRefusedError: the step cannot be published.
            PublishError: a signal handler or `progress` calls this in the middle of another call, or has called
                `close` in the middle of this one.
            NoSpaceError, StorageError: the file system would not.
            TypeError, ValueError: an argument cannot be one, such as `metadata` that is no text.
            ConflictError: the service watches another root, or follows another service. At the publisher's first
                version nothing is written.
            ServiceProblemError: the service refuses the notice, as for a wrong token. The version stands all the
                same, and is the error's `publication`. A service that is down raises nothing: see `notice_error`.
        """
        step = whole_step(step)
        if block not in {"committed", "staged"}:
            raise ValueError(f"block is {block!r}: it is 'committed' or 'staged'")
        if delta not in {"auto", "never"}:
            raise ValueError(f"delta is {delta!r}: it is 'auto' or 'never'")
        if handover and self._context.connection is None:
            raise ValueError("handover=True needs a service to tell engines: open the publisher with service_url")
        if handover and delta != "never":
            raise ValueError("handover=True and delta='auto' are two ways: leave one out")
        if transport is not None and (handover or delta != "never" or block != "committed"):
            raise ValueError("transport goes without delta, block and handover: it says what they would")
        said = metadata_texts(metadata)
        may_lack = name_patterns(allow_missing)
        if self._context.bucket is not None and (may_lack or allow_extra):
            raise ValueError("allow_missing and allow_extra go to a service with the notice, which a store has none of")
        with self._call("publish"):
            self._background.settle()
            order = self._placed(step)
            self._context.mappings.prune()
            trace, late, routed = PublishTrace(self._folder.run, step), DUE, dict[str, str]()
            destination = None
            if transport is not None:
                route = route_of(transport, weights, self._receivers, self._durability)
                delta, handover, block, destination = route.delta, route.handover, "staged", route.destination
                reason = route.instead or (DUE.reason if handover else None)
                late = Handed(reason=reason, transport=route.choice.transport, why=route.choice.why)
                routed = route.metadata
            attempt = PublishAttempt(
                context=self._context,
                order=order,
                metadata=trace.carrier | routed | said,
                allow_missing=may_lack,
                allow_extra=allow_extra,
                trace=trace,
                progress=progress,
                delta=delta,
                begun=self._folder.begun(order),
                check=self._turn.require_open,
                destination=destination,
                policy=self._durability.of_next(self._context.handover.since) if handover else None,
            )
            if handover and not self._context.handover.due:
                rest, handed = attempt.hand_over(weights)
                handed = replace(handed, transport=late.transport, why=late.why)
                return attempt.staged(self._background.begin(rest), handed)
            if handover or block == "staged":
                told = late if handover or late is not DUE else None
                return attempt.staged(self._background.begin(attempt.stage(weights)), told)
            publication = attempt.write(weights)
        return attempt.announce(publication)

    def _placed(self, step: int) -> Order:
        """The generation and step. The service may know of steps that a root which was emptied does not."""
        if not self._folder.is_begun:
            known = newest_known(self._context.connection, self._folder.run, self._folder.root)
            if known is not None:
                self._folder.note_known(known)
        order = self._folder.place(step)
        if self._context.bucket is not None and not self._folder.is_begun:
            while self._context.bucket.is_used(order):  # a publisher that is dead began to upload it
                self._folder.note_known(order)
                order = self._folder.place(step)
        return order
