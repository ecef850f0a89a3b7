"""One version on its way from the trainer's tensors to the notice.

    offer       what is to be written: everything, or what changed (part `deltas`)
    write       the files and their commit, in one go; or
    stage       the bytes (of a delta nothing: it was copied when it was compared); the rest then in the background
    hand_over   the tensors to engines on this host, and then the bytes as with `stage` (part `memory`)
    announce    the notice

If it stops before the commit, deltas begin anew: what they were compared with is not what was published last.
"""

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, Self

from refitd_client.checkpoint.opening import CONFIG_NAME
from refitd_client.contract.manifest import (
    Manifest,
    ManifestRefusedError,
    fitting_fingerprints,
    metadata_texts,
    parse_manifest,
)
from refitd_client.contract.naming import (
    DURABLE_KEY,
    INDEX_NAME,
    MANIFEST_NAME,
    Order,
    name_patterns,
    version_folder,
    version_id,
    whole_step,
)
from refitd_client.contract.states import Kind
from refitd_client.contract.wire import Notice
from refitd_client.errors import NO_SPACE, PublishError, ServiceProblemError, StorageError
from refitd_client.files.durable import Mappings
from refitd_client.http.connection import Connection
from refitd_client.http.publisher_client import root_name
from refitd_client.publish.options import Block, Sharded
from refitd_client.publish.ports import Deltas, MemoryExport, MemoryWay, StoreTarget
from refitd_client.publish.publication import CommittedFacts, Handed, PendingPublication, Publication, announce
from refitd_client.publish.run_folder import RunFolder
from refitd_client.publish.tracing import PublishTrace
from refitd_client.ways import BY_FILES, TRANSPORTS, Transport
from refitd_client.write.content import Content, PlannedContent, WeightsReader
from refitd_client.write.version_folder import Laps, Meter, Progress, Staging, free_bytes, no_space, staged

_log = logging.getLogger("refitd_client")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishCall:
    """What one call of `publish` asks for, whose arguments they are."""

    step: int
    sharded: Mapping[str, Sharded] | None = None
    metadata: Mapping[str, str] | None = None
    allow_missing: Sequence[str] = ()
    allow_extra: bool = False
    progress: Callable[[Progress], None] | None = None
    transport: Transport | None = None
    block: Block | None = None

    def checked(self, connection: Connection | None, *, of_ranks: bool = False) -> Self:
        """The same, each argument as it is used.

        Raises:
            ValueError, TypeError: an argument cannot be one; the message names it.
        """
        if self.block not in (None, "committed", "staged"):
            raise ValueError(f"block is {self.block!r}: it is 'committed' or 'staged'")
        if self.transport is not None and self.transport not in TRANSPORTS:
            raise ValueError(f"transport is {self.transport!r}: it is one of {', '.join(TRANSPORTS)}")
        if self.transport not in {None, *BY_FILES} and connection is None:
            raise ValueError(f"transport={self.transport!r} needs the service_url of the service that has the engines")
        if of_ranks and (self.block == "staged" or self.progress is not None):
            raise ValueError("block='staged' and progress are for one process: ranks return when all have written")
        sharded = self.sharded or {}
        if sharded and not of_ranks:
            raise ValueError("sharded describes the parts of several ranks: open the publisher with ranks=")
        return replace(
            self,
            step=whole_step(self.step),
            sharded=sharded,
            metadata=metadata_texts(self.metadata),
            allow_missing=name_patterns(self.allow_missing),
        )


def _checked(manifest: Manifest) -> bytes:
    data = manifest.to_json()
    try:
        parse_manifest(data)  # what is written is what the service can read
    except ManifestRefusedError as error:
        why = f"the version's manifest would be refused ({error}): is the metadata small?"
        raise PublishError(why) from error
    return data


@dataclass(slots=True, kw_only=True)
class PublisherContext:
    """What a publisher has for all of its versions.

    `memory` brings versions to engines from the trainer's memory, None in a tree without the ring. `engines` is what
    each notice asks for where no engine follows the run. `make_deltas` makes what `deltas` returns, when it is first
    needed. `target` is the run in an object store.
    """

    folder: RunFolder
    reader: WeightsReader
    make_deltas: Callable[[], Deltas]
    mappings: Mappings
    connection: Connection | None
    memory: MemoryWay | None
    engines: Literal["mine"] | None = None
    target: StoreTarget | None = None
    _deltas: Deltas | None = field(default=None, init=False)

    @property
    def deltas(self) -> Deltas:
        if self._deltas is None:
            self._deltas = self.make_deltas()
        return self._deltas

    def forget_deltas(self, *, failed: bool = False) -> None:
        """Begin deltas anew: the copy of the weights may not be what was published last any more."""
        if self._deltas is not None:
            self._deltas.forget(failed=failed)

    def committed(self, version: str) -> None:
        """The version is durable: deltas may be made on it, and the last hand-over's files are no longer owed."""
        if self._deltas is not None:
            self._deltas.committed(version)
        if self.memory is not None:
            self.memory.due, self.memory.since = False, 0


@dataclass(slots=True, kw_only=True)
class PublishAttempt:
    """One version. It is written or staged, once; the next one begins when that has ended.

    `metadata` are the call's, with those of its trace and its way. `begun` says that a generation of the run begins
    with it, and is logged when it has. `trace` ends with it. `check` raises if the publisher was closed in the call
    that is under way: until the bytes are staged, or the commit begins. A hand-over sends the tensors to `destination`,
    and is all where all engines take them and a `policy` needs no files.
    """

    context: PublisherContext
    order: Order
    call: PublishCall
    metadata: dict[str, str]
    may_be_delta: bool
    begun: str | None
    trace: PublishTrace
    check: Callable[[], None]
    destination: Any = None
    policy: str | None = None
    _laps: Laps = field(default_factory=Laps, init=False)
    _needed: int = field(default=0, init=False)
    _known: dict[str, Any] = field(default_factory=dict[str, Any], init=False)  # of a publication, before it is written

    def write(self, weights: Any) -> Publication:
        """Write and commit the version. The service does not know of it yet."""
        with self._guarded(), self._offered(weights) as offer:
            manifest = self._write(self._content_of(offer), self.call.progress)
            self.context.committed(self._id)
        return self._publication(manifest)

    def stage(self, weights: Any) -> Callable[[], Publication]:
        """Take what is needed of the weights. What is returned does the rest, in any thread, and must be called."""
        with self._guarded(), self._offered(weights) as offer:
            if offer.kind is Kind.DELTA:  # `progress` is called in the trainer's thread only, and that goes on
                self.check = lambda: None
                return self._finishing(lambda: self._write(self._content_of(offer), None))
            return self._finishing(self._stage(self._content_of(offer)))

    def hand_over(self, weights: Any) -> tuple[Callable[[], Publication], Handed]:
        """Offer the tensors to engines on this host, then as `stage`. Returns the rest, and what the engines answered.

        One after the other: side by side both would take turns on the GPU, and requests wait longer for the new weights
        (ADR 8). Where the tensors are sent, the bytes are staged when all have arrived, while engines load. If the
        version has no files in the end, the service is sent a notice that says so.
        """
        export = self._export()
        try:
            with self._guarded(), self._offered(weights) as offer:
                content = self._content_of(offer)
                self._require_space(content)  # before engines take what could have no files
                self.check()
                self.check = lambda: None  # from here on it is finished: engines may have taken it
                self.context.folder.promise(self.order)  # engines may know the version, with files or without
                finish, handed = export.of(content, self._stage)
                if finish is None:
                    return partial(self._publication, None), handed
        except BaseException as error:
            export.failed(error)
            raise
        return self._finishing(finish, export), handed

    def announce(self, publication: Publication) -> Publication:
        """Send the notice. A service that does not carry out deltas is sent no more of them."""
        try:
            with self.trace.last_span("notice"):
                return announce(publication)
        except ServiceProblemError as error:
            if publication.kind is Kind.DELTA and error.problem.slug == "unsupported-kind":
                self.context.deltas.refuse(f"the service refuses deltas: {error.problem.detail}")
            raise

    def staged(self, pending: PendingPublication, handed: Handed | None = None) -> Publication:
        return self._begun(pending=pending, handed=handed)

    def _begun(self, **known: Any) -> Publication:
        return Publication(
            run=self.context.folder.run,
            generation=self.order.generation,
            step=self.order.step,
            path=self.context.folder.folder_of(self.order),
            version_id=self._id,
            connection=self.context.connection,
            **self._known,
            **known,
        )

    @property
    def _id(self) -> str:
        return version_id(self.context.folder.run, self.order)

    def _finishing(
        self, finish: Callable[[], Manifest], export: MemoryExport | None = None
    ) -> Callable[[], Publication]:
        def rest() -> Publication:
            try:
                with self._guarded():
                    manifest = finish()
                    self.context.committed(self._id)
            except BaseException as error:
                if export is not None:
                    export.failed(error)
                raise
            return self.announce(self._publication(manifest))

        return rest

    def _export(self) -> MemoryExport:
        connection, memory = self.context.connection, self.context.memory
        if connection is None or memory is None:
            raise ValueError("a hand-over needs a service to tell engines: open the publisher with service_url")
        # The service reads the policy in an offer's metadata: what a trainer says under that key is left out.
        metadata = {key: text for key, text in self.metadata.items() if key != DURABLE_KEY}
        if self.policy is not None:
            metadata[DURABLE_KEY] = self.policy
        return memory.export(
            self._notice(Kind.HANDOVER, metadata),
            self._id,
            self.context.folder.root,
            connection,
            self.destination,
            wants_files=self.policy is None,
        )

    def _notice(self, kind: Kind, metadata: dict[str, str], **more: Any) -> Notice:
        folder = self.context.folder
        return Notice(
            run=folder.run,
            step=self.order.step,
            path=f"{folder.run}/{version_folder(self.order)}",
            kind=kind,
            allow_missing=list(self.call.allow_missing),
            allow_extra=self.call.allow_extra,
            metadata=metadata,
            root=root_name(folder.root),
            engines=self.context.engines,
            **more,
        )

    def _content_of(self, offer: PlannedContent) -> Content:
        with self._laps.lap("encode") if offer.kind is Kind.DELTA else nullcontext():
            content = offer.content()
        self._needed = content.size
        return replace(content, claims=replace(content.claims, why_full=offer.why_full, density=offer.density))

    def _require_space(self, content: Content) -> None:
        folder, free = self.context.folder, free_bytes(self.context.folder.path)
        if free < self._needed and not folder.has_slot(content.weights.layout):
            raise no_space(folder.path, self._needed, free)

    def _write(self, content: Content, progress: Callable[[Progress], None] | None) -> Manifest:
        """Write the version, durably, and give it its name. After any error no version is visible."""
        with self._staged(content, progress) as staging:
            with self._laps.lap("write"):
                content.weights.write(staging)
            return self._complete(content, staging)

    def _stage(self, content: Content) -> Callable[[], Manifest]:
        """Copy the version's bytes, so that the caller may change its tensors; return what does the rest.

        That must be called, in any thread. Until it has returned nothing is visible.
        """
        with ExitStack() as stack:
            staging = stack.enter_context(self._staged(content, self.call.progress))
            with self._laps.lap("stage"):
                seal = content.weights.stage(staging)
            staging.meter.check = lambda: None  # what is staged is finished, also by a publisher that is closed
            held = stack.pop_all()

        def finish() -> Manifest:
            with held:
                with self._laps.lap("write"):
                    seal()
                return self._complete(content, staging)

        return finish

    def _staged(self, content: Content, progress: Callable[[Progress], None] | None) -> AbstractContextManager[Staging]:
        folder, meter = self.context.folder, Meter(content.size, progress, self.check)
        meter.check()
        take = partial(folder.take_slot, content.weights.layout)
        return staged(folder.path, meter, self._laps, take=take, mappings=self.context.mappings)

    def _complete(self, content: Content, staging: Staging) -> Manifest:
        folder, times, claims = self.context.folder, self._laps.times, content.claims
        with self._laps.lap("write"):
            if content.index:
                with staging.file(INDEX_NAME) as file:  # after the shards: others take it for a sign that all is there
                    file.write(content.index)
            for path in content.companions:
                staging.copy(path)
            if content.config:
                with staging.file(CONFIG_NAME) as file:
                    file.write(content.config)
        times["write"] = max(0.0, times["write"] - times.get("sync", 0.0))
        manifest = Manifest(
            run=folder.run,
            generation=self.order.generation,
            step=self.order.step,
            files=staging.files,
            tensors=content.tensors,
            created_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            metadata=self.metadata,
            kind=claims.kind,
            base=claims.base,
            fingerprints=claims.fingerprints or fitting_fingerprints(staging.fingerprints),
            delta=claims.delta,
            why_full=claims.why_full,
            density=claims.density,
        )
        staging.meter.check()
        with self._laps.lap("commit"):
            # Before the name: a version that may have been seen counts, even when it is gone after a crash.
            folder.record(self.order, staging.path)
        data = _checked(manifest)
        try:
            staging.commit(data, MANIFEST_NAME, folder.folder_of(self.order))
        except BaseException:
            if staging.was_seen:
                folder.withdrawn(self.order)
            raise
        folder.published(self.order)
        if self.context.target is not None:
            with self._laps.lap("upload"):
                self.context.target.publish(folder, self.order, data)
        return manifest

    @contextmanager
    def _offered(self, weights: Any) -> Generator[PlannedContent, None, None]:
        """What is to be written. The weights are not needed after the block."""
        self.check()
        try:
            content = self.context.reader.content(weights)
            if not self.may_be_delta:
                self.context.forget_deltas()
                offer = PlannedContent(content=lambda: content, kind=content.claims.kind)
            else:
                with self._laps.lap("compare"):
                    offer = self.context.deltas.offer(content, self._id)
            self._known = {"kind": offer.kind, "why_full": offer.why_full, "density": offer.density}
            yield offer
        finally:
            self.context.reader.release()

    @contextmanager
    def _guarded(self) -> Generator[None, None, None]:
        """Begin deltas anew and end the trace, whatever is raised; an OSError becomes an error of this package."""
        folder = self.context.folder
        try:
            yield
        except BaseException as error:
            self.context.forget_deltas(failed=True)
            self.trace.end(error)
            if not isinstance(error, OSError):
                raise
            if error.errno in NO_SPACE:
                raise no_space(folder.path, self._needed, free_bytes(folder.path)) from error
            raise StorageError(f"{folder.folder_of(self.order)} could not be written: {error}") from error

    def _publication(self, manifest: Manifest | None) -> Publication:
        """What was published; without a manifest it is in the engines' memory alone."""
        if self.begun is not None:
            _log.warning("%s", self.begun)
        kind, size, base, digest = self._known["kind"], 0, None, ""
        if manifest is not None:
            size, base = sum(file.size for file in manifest.files.values()), manifest.base
            digest = manifest.digest
        self.trace.add({"version": self._id, "kind": kind.value, "bytes": size})
        facts = CommittedFacts(
            bytes=size,
            digest=digest,
            timings=self._laps.times,
            notice=self._notice(
                kind, self.metadata, base=base, publish_ms=self._laps.since_begin, digest=digest or None
            ),
            base=base,
            begun=self.begun,
            url=None if self.context.target is None else self.context.target.url(self.order),
            in_memory=manifest is None,
        )
        return self._begun(facts=facts)
