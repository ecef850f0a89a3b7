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
in the files; the rest is done by one thread, in order. Several ranks publish together (part `ranks`): rank 0 takes the
run and commits.
"""

import logging
import os
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from refitd_client.contract.naming import Order, whole_step
from refitd_client.contract.stores import is_bucket_url, require_folder
from refitd_client.errors import PublishError, RefitError, TransportRefusedError
from refitd_client.files.durable import Mappings
from refitd_client.http.connection import connect_to
from refitd_client.http.publisher_client import ReceiversQuery, newest_known
from refitd_client.parts import part
from refitd_client.publish.attempt import PublishAttempt, PublishCall, PublisherContext
from refitd_client.publish.options import ALL, Block, DurabilityPolicy, PublishOptions, Sharded
from refitd_client.publish.ports import MemoryWay, ObjectStore, PublishRoute, deltas_of, reading_of
from refitd_client.publish.publication import Background, Handed, PendingPublication, Publication, Turn
from refitd_client.publish.run_folder import RunFolder
from refitd_client.publish.tracing import PublishTrace
from refitd_client.tensors import is_source
from refitd_client.ways import BY_FILES, Choice, Transport
from refitd_client.write.content import WeightsReader, casts_for, fp8_blocks
from refitd_client.write.version_folder import Progress

if TYPE_CHECKING:
    import torch

    from refitd_client.publish.ports import WeightSource

    TrainerWeights = Mapping[str, Any] | torch.nn.Module | str | os.PathLike[str] | WeightSource

_log = logging.getLogger("refitd_client")
DUE = "the files of what was handed over before were never written: these come first"
"""Why a hand-over is not made."""
_NO_MEMORY = "this installation of refitd brings no version from a trainer's memory"


class WeightPublisher:
    """Publishes the versions of one run. One at a time: the run stays locked until `close`, or the process ends.

    >>> with WeightPublisher("/shared/weights", "exp/trial", "http://127.0.0.1:8700") as publisher:
    ...     publisher.publish(model, step=123).wait()

    With `ranks` all ranks of a trainer publish, each its part, and nothing is gathered: FSDP2, HSDP, tensor, pipeline
    and expert parallel, DDP, and mixes. The files are those that one process would write of the gathered state dict.
    Opening, publishing and closing are collective then: every rank does them, in the same order.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        run: str,
        service_url: str | None = None,
        *,
        ranks: Literal["all"] | Any = None,
        options: PublishOptions | None = None,
    ) -> None:
        """Take a run.

        Args:
            root: the folder that the service watches; made if it is not there. Or an object store's URL, such as
                `s3://bucket/prefix`, which services follow; then there is no `service_url` (docs/object-stores.md).
                Ranks see one folder of one file system, which may be mounted at different places.
            run: the run's name, such as `experiment/trial`; the same on every rank.
            service_url: the service to send notices to, or those of a group, separated by commas; without it the
                service finds versions by watching the root.
            ranks: None where one process publishes. `all` are all ranks of `torch.distributed`, in a group of their
                own; or the process group of those that publish, which can carry CPU tensors (gloo).
            options: everything else; without it the defaults.

        Raises:
            NameRefusedError: the run's name is no safe relative one.
            RunBusyError: another publisher has the run.
            PublishError: `base_model` is no model's folder, or quantised in another way than `dtype` says; the run's
                record is damaged; ranks do not agree on `root`, `run` or `max_shard_bytes`; or torch.distributed is not
                initialised. What fails on one rank is raised on every rank, and names the rank.
            RankLostError: a rank is gone, or did not come.
            StorageError: the run's folder cannot be made, read or locked.
            ConflictError: there is no such folder, and the service, which answers, watches another one.
            BucketError: the object store cannot be reached, refuses, or does not keep conditions of writes.
            ValueError: a URL, the token or an option cannot be one.
        """
        options = options or PublishOptions()
        if ranks is None:
            self._publisher = RunPublisher(root, run, service_url, options)
        else:
            if (open_ranks := part("ranks")) is None:
                raise PublishError("this installation of refitd publishes from one process alone, without ranks")
            group = None if ranks == "all" else ranks
            self._publisher = open_ranks(root, run, service_url, group, options, take=RunPublisher)

    @property
    def rank(self) -> int:
        """This process's rank among those that publish. Rank 0 makes the files, commits them and tells the service."""
        return 0 if isinstance(self._publisher, RunPublisher) else self._publisher.rank

    def close(self) -> None:
        """Finish what is under way, and unlock the run. Publications stay usable.

        In a signal handler, or in `progress`, it has a `publish` that it interrupts end with a PublishError, leave
        nothing behind and unlock the run, on all ranks. It returns before that.

        Raises:
            PublishError, ServiceProblemError: a publication failed in the background, and no call has raised that yet.
        """
        self._publisher.close()

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
            PublishError: this publisher is closed, or a signal handler calls this in the middle of another call; or
                several ranks publish, where the publication's `begun` says it.
        """
        return self._publisher.begins(step)

    def publish(
        self,
        weights: "TrainerWeights",
        *,
        step: int,
        transport: Transport | None = None,
        block: Block | None = None,
        sharded: Mapping[str, Sharded] | None = None,
        metadata: Mapping[str, str] | None = None,
        allow_missing: Sequence[str] = (),
        allow_extra: bool = False,
        progress: Callable[[Progress], None] | None = None,
    ) -> Publication:
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
                buffers), or the path of a checkpoint's folder with `*.safetensors`. With ranks the module or this
                rank's state dict: DTensors, plain tensors that all ranks hold alike, plain parts described in
                `sharded`, and tensors that only some ranks have (pipeline or expert parallel). Or a source of weights,
                such as vLLM's `WeightSource`, which is read to its end once; with ranks all read theirs together.
            step: the trainer's step, above the last that this publisher published; the same on every rank.
            transport: how engines get it, the same on every rank (docs/transports.md). Without it by files, in full, as
                with `disk`. `delta` writes only what changed since the version that engines serve, where there is one,
                and little changed; the publication's `why_full` says why not. It takes a copy of the weights. With
                `handover` engines on this host copy the tensors from where they are (docs/handover.md), and with `nccl`
                or `gloo` they are sent to the engines' ranks, before the files are written; `auto` takes the fastest
                that can work between this trainer and the run's engines. Where no engine of the run can receive what is
                asked for, as without refitd inside, the version goes by its files. The publication's `handed` and the
                version's metadata say which was taken, and why.
            block: `committed` or `staged`. Without it `committed` for files, and `staged` for all that may go another
                way: it returns when engines have answered, 20 s at most, and the bytes are staged.
            sharded: which plain tensors are parts of larger ones, by the trainer's names; with ranks alone.
            metadata: texts for the manifest and the service, by keys that are texts; rank 0's count.
            allow_missing: patterns of the names of tensors that the version may lack of those that the engines' model
                has, such as `mtp.*`: engines keep their start-up weights of those. Without it such a version is
                rejected. Rank 0's word counts.
            allow_extra: the version may have tensors that the engines' model lacks. Without it such a version is
                rejected. Rank 0's word counts.
            progress: is called with how far writing is, in this thread; of one process alone.

        Returns:
            The publication, the same on every rank; `wait` on it on one. That of ranks is committed.

        Raises:
            InvalidWeightsError: the weights cannot be a version; the message names the tensor or file, and the rank.
            TransportRefusedError: `nccl` or `gloo` is asked for, engines of the run can receive, and it cannot work
                between them and this trainer.
            StepConflictError, NameRefusedError: the step cannot be published, or ranks are at different steps.
            PublishError: a signal handler or `progress` calls this in the middle of another call, or has called
                `close` in the middle of this one; or ranks do not agree on `transport`, `delta_rules` or `durable`.
            RankLostError: a rank died or is late. Nothing is visible; open a new publisher on the ranks of a new group.
            NoSpaceError, StorageError: the file system would not.
            TypeError, ValueError: an argument cannot be one, such as `metadata` that is no text; it names the rank.
            ConflictError: the service watches another root, or follows another service. At the publisher's first
                version nothing is written.
            ServiceProblemError: the service refuses the notice, as for a wrong token. The version stands all the
                same, and is the error's `publication`. A service that is down raises nothing: see `notice_error`.
        """
        call = PublishCall(
            step=step,
            sharded=sharded,
            metadata=metadata,
            allow_missing=allow_missing,
            allow_extra=allow_extra,
            progress=progress,
            transport=transport,
            block=block,
        )
        return self._publisher.publish(weights, call)


class RunPublisher:
    """Publishes from one process, or from rank 0 what all ranks agreed on. The run stays locked until `close`."""

    def __init__(
        self, root: str | os.PathLike[str], run: str, service_url: str | None, options: PublishOptions
    ) -> None:
        options.check(service_url)
        self._durability = DurabilityPolicy.of(options.durable)
        base = options.base()
        rules = casts_for(options.dtype, base)
        reader = WeightsReader(
            base_model=base,
            max_shard_bytes=options.max_shard_bytes,
            check_finite=options.check_finite,
            casts=rules,
            rename=options.rename,
            fingerprinted=options.fingerprints,
            blocks=fp8_blocks(rules, base),
            given=options.given(),
        )
        connection = None
        if service_url is not None:
            connection = connect_to(service_url, token=options.token, token_file=options.token_file)
        self._receivers = None if connection is None else ReceiversQuery(connection, run)
        store = store_at(root, service_url, options.keep)
        if store is None and not Path(root).is_dir():
            newest_known(connection, run, Path(root).absolute())  # before a folder is made beside the service's root
        self._folder = RunFolder(Path(root).absolute() if store is None else store.spool, run)
        try:
            self._folder.remove_dead()
            target = None if store is None else store.begin(self._folder, options.keep)
        except BaseException:
            self._folder.lock.release()
            raise
        base = None if target is None else target.base
        memory = part("memory")
        self._turn = Turn()
        self._background = Background()
        self._context = PublisherContext(
            folder=self._folder,
            reader=reader,
            make_deltas=partial(deltas_of, options, connection, run, base),
            mappings=Mappings(),
            connection=connection,
            memory=None if memory is None or connection is None else memory(self._folder.path),
            engines=options.engines,
            target=target,
        )
        self._finalizer = weakref.finalize(self, _release, self._background.begun, self._context)
        self._finalizer.atexit = False  # the end of the process gives everything back

    @property
    def root(self) -> Path:
        return self._folder.root

    def close(self) -> None:
        """Finish what is under way, and unlock the run. Raises as `WeightPublisher.close`."""
        if not self._turn.end():
            with self._call("close"):
                self._give_back()

    def begins(self, step: int) -> str | None:
        with self._call("begins"):
            return self._folder.begun(self._placed(whole_step(step)))

    def publish(self, weights: Any, call: PublishCall) -> Publication:
        """Write a version, or hand it over, as `WeightPublisher.publish` does.

        Args:
            weights: what the trainer passes, or the `Content` that all ranks hold.
            call: the other arguments.
        """
        call = call.checked(self._context.connection)
        if self._context.target is not None and (call.allow_missing or call.allow_extra):
            raise ValueError("allow_missing and allow_extra go to a service with the notice, which a store has none of")
        with self._call("publish"):
            self._background.settle()
            order = self._placed(call.step)
            if is_source(weights):
                reading = reading_of(weights)
                weights = reading.kept(reading.shares([reading.word])[0])
            self._context.mappings.prune()
            trace, route, told, memory = PublishTrace(self._folder.run, call.step), None, None, self._context.memory
            if call.transport is not None:
                route = route_of(call.transport, weights, memory, self._receivers, self._durability)
                reason = route.instead or (DUE if route.handover else None)
                told = Handed(reason=reason, transport=route.choice.transport, why=route.choice.why)
            handover = memory is not None and route is not None and route.handover
            attempt = PublishAttempt(
                context=self._context,
                order=order,
                call=call,
                metadata=trace.carrier | ({} if route is None else route.metadata) | dict(call.metadata or {}),
                trace=trace,
                may_be_delta=route is not None and route.choice.transport == "delta",
                begun=self._folder.begun(order),
                check=self._turn.require_open,
                destination=None if route is None else route.destination,
                policy=None if memory is None or not handover else self._durability.of_next(memory.since),
            )
            publication = self._begun(attempt, weights, call, told, handover=handover)
        if publication.pending is None:
            return attempt.announce(publication)
        return publication.committed() if call.block == "committed" else publication

    def _begun(
        self, attempt: PublishAttempt, weights: Any, call: PublishCall, told: Handed | None, *, handover: bool
    ) -> Publication:
        """Hand the version over or write it, as far as the trainer is held."""
        memory = self._context.memory
        if handover and told is not None and memory is not None and not memory.due:
            rest, handed = attempt.hand_over(weights)
            handed = replace(handed, transport=told.transport, why=told.why)
            return attempt.staged(self._background.begin(rest), handed)
        if call.block == "staged" or call.transport not in {None, "disk", "delta"}:
            return attempt.staged(self._background.begin(attempt.stage(weights)), told)
        return replace(attempt.write(weights), handed=told)

    def _placed(self, step: int) -> Order:
        """The generation and step. The service may know of steps that a root which was emptied does not."""
        if not self._folder.is_begun:
            known = newest_known(self._context.connection, self._folder.run, self._folder.root)
            if known is not None:
                self._folder.note_known(known)
        order = self._folder.place(step)
        if self._context.target is not None and not self._folder.is_begun:
            while self._context.target.is_used(order):  # a publisher that is dead began to upload it
                self._folder.note_known(order)
                order = self._folder.place(step)
        return order

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


def _release(begun: list[PendingPublication], context: PublisherContext) -> None:
    """Give everything back when the last publication has ended: until then it writes, and its step is not free."""

    def give_back() -> None:
        if not context.folder.lock.held:  # in a forked child: what is registered is its parent's
            return
        try:
            context.forget_deltas()
            context.mappings.close()
        finally:
            if context.target is not None:
                context.target.close()
            if context.memory is not None:
                context.memory.close()  # before the lock: the next one to export there voids what it finds
            context.folder.lock.release()

    if begun:
        begun[-1].afterwards(give_back)
    else:
        give_back()


def store_at(root: str | os.PathLike[str], service_url: str | None, keep: int) -> ObjectStore | None:
    """Return the object store that a root names; None where the root is a folder.

    Raises:
        ValueError: the root can be neither; or a service or a number of versions does not go with a store.
        PublishError: this installation has no object stores.
    """
    if not is_bucket_url(text := os.fspath(root)):
        require_folder(text)
        return None
    if service_url is not None:
        raise ValueError("an object store goes without service_url: services follow the store by themselves")
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least the newest version is kept")
    if (open_store := part("stores")) is None:
        raise PublishError("this installation of refitd publishes into folders alone, and into no object store")
    return open_store(text)


def route_of(
    transport: Transport,
    weights: Any,
    memory: MemoryWay | None,
    receivers: ReceiversQuery | None,
    durable: DurabilityPolicy = ALL,
) -> PublishRoute:
    """Decide how a publication goes.

    Args:
        memory: None in a tree without the ring.
        receivers: asks the service who can receive; None where there is none to ask.

    Raises:
        TransportRefusedError: what is asked for cannot work between this trainer and these engines.
        ValueError: there is no service to ask.
    """
    if transport in BY_FILES:
        return PublishRoute(choice=Choice(transport=transport, why="the trainer asks for it"))
    if receivers is None:
        raise ValueError(f"transport={transport!r} needs the service_url of the service that has the engines")
    if memory is None:
        if transport != "auto":
            raise TransportRefusedError(f"transport={transport!r} cannot work: {_NO_MEMORY}")
        return PublishRoute(choice=Choice(transport="delta", why=f"files go everywhere ({_NO_MEMORY})"))
    route = memory.route(transport, weights, receivers)
    if route.instead != receivers.connection.reach.told:
        receivers.connection.reach.told = route.instead
        if route.instead is not None:  # once, and again when it changes: a step would say what the one before has said
            _log.warning("the version goes by its files: %s", route.instead)
    if route.handover or route.instead is not None or durable.is_always:
        return route
    return replace(route, instead=f"all versions get files, whatever durable={durable.text!r} says: {route.choice.why}")
