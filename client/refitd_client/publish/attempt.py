"""One version on its way from the trainer's tensors to the notice.

    offer       what is to be written: everything, or what changed (`delta/`)
    write       the files and their commit, in one go; or
    stage       the bytes, until the trainer may go on; the files and their commit then in the background. What changed
                has been copied when it is offered: a delta is put together and written in the background
    hand_over   the tensors to engines on this host, and then the bytes as with `stage` (`handover/`)
    announce    the notice

Whatever stops it before the commit, deltas begin anew: what they were compared with is not what was published last.
"""

import errno
import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

from refitd_client.contract.naming import Order, version_folder, version_id
from refitd_client.contract.states import Kind
from refitd_client.contract.wire import Notice
from refitd_client.delta.maker import Offer
from refitd_client.errors import ServiceProblemError, StorageError
from refitd_client.http.handshake import name_of
from refitd_client.publish.announcement import announce
from refitd_client.publish.background import Outcome
from refitd_client.publish.context import Means
from refitd_client.publish.publication import Publication, StagedPublication
from refitd_client.publish.tracing import PublishTrace
from refitd_client.publish.writing import VersionWriter, Written
from refitd_client.transport.ipc.exporting import TensorExport
from refitd_client.transport.ipc.handing import Handed, Place
from refitd_client.write.content import Content
from refitd_client.write.progress import Laps, Progress
from refitd_client.write.version_folder import free_bytes, no_space

DeltaChoice = Literal["auto", "never"]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_log = logging.getLogger("refitd_client")


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One version. It is written or staged, once; the next one begins when that has ended.

    `begun` says that a generation of the run begins with it, and is logged when it has. `trace` ends with it.
    """

    means: Means
    order: Order
    metadata: dict[str, str]
    allow_missing: bool
    allow_extra: bool
    progress: Callable[[Progress], None] | None
    delta: DeltaChoice
    begun: str | None
    trace: PublishTrace
    _laps: Laps = field(default_factory=Laps, init=False)
    _needed: int = field(default=0, init=False)

    def write(self, weights: Any) -> Publication:
        """Write and commit the version. Nobody was told of it yet."""
        with self._guarded(), self._offered(weights) as offer:
            written = self._writer(self.progress).write(self._made(offer))
            self._committed()
        return self._publication(offer, written)

    def stage(self, weights: Any) -> Callable[[], Publication]:
        """Take what is needed of the weights. What is returned does the rest, in any thread, and must be called."""
        with self._guarded(), self._offered(weights) as offer:
            finish = self._begun(offer)
        return self._finishing(offer, finish)

    def hand_over(self, weights: Any) -> tuple[Callable[[], Publication], Handed]:
        """As `stage`, after engines that could have copied the tensors: what came of that. Side by side both would take
        turns on the GPU, and requests wait longer for the new weights (ADR 8).

        Where the version does not come about after all, the service is told so.
        """
        exporting = self._exporting
        try:
            with self._guarded(), self._offered(weights) as offer:
                content = self._made(offer)
                self._require_room(content)
                self.means.folder.promise(self.order)  # whatever becomes of its files: engines may hear of it now
                answered = exporting.of(content)
                finish = self._writer(self.progress).stage(answered.content)
        except BaseException as error:
            exporting.failed(error)
            raise
        return self._finishing(offer, finish, exporting), answered.handed

    def announce(self, publication: Publication) -> Publication:
        """Tell the service. A service that does not carry out deltas is sent no more of them."""
        try:
            with self.trace.last_part("notice"):
                return announce(publication)
        except ServiceProblemError as error:
            if publication.kind is Kind.DELTA and error.problem.slug == "unsupported-kind":
                self.means.deltas.refuse(f"the service refuses deltas: {error.problem.detail}")
            raise

    def _finishing(
        self, offer: Offer, finish: Callable[[], Written], exporting: TensorExport | None = None
    ) -> Callable[[], Publication]:
        def rest() -> Publication:
            try:
                with self._guarded():
                    written = finish()
                    self._committed()
            except BaseException as error:
                if exporting is not None:
                    exporting.failed(error)
                raise
            return self.announce(self._publication(offer, written))

        return rest

    def _committed(self) -> None:
        """It is durable: deltas may be on it, and what was handed over before owes nothing any more."""
        self.means.deltas.committed(self._id)
        self.means.debt.due = False

    @property
    def _exporting(self) -> TensorExport:
        connection, folder = self.means.connection, self.means.folder
        if connection is None:
            raise ValueError("handover=True needs a service to tell engines: open the publisher with service_url")
        place = Place(
            root=folder.root,
            run=folder.run,
            order=self.order,
            connection=connection,
            metadata=self.metadata,
            allow_missing=self.allow_missing,
            allow_extra=self.allow_extra,
            engines=self.means.engines,
        )
        return TensorExport(place=place, layouts=self.means.layouts, debt=self.means.debt)

    def staged(self, outcome: Outcome, handed: Handed | None = None) -> StagedPublication:
        """What the trainer gets while the rest goes on."""
        return StagedPublication(
            run=self.means.folder.run,
            generation=self.order.generation,
            step=self.order.step,
            path=self.means.folder.folder_of(self.order),
            version_id=self._id,
            outcome=outcome,
            handed=handed,
        )

    def _begun(self, offer: Offer) -> Callable[[], Written]:
        """Take what the trainer's tensors are needed for; return the rest."""
        if offer.is_delta:  # `progress` is called in the trainer's thread only, and that goes on
            return lambda: self._writer(None).write(self._made(offer))
        return self._writer(self.progress).stage(self._made(offer))

    def _made(self, offer: Offer) -> Content:
        with self._laps.lap("encode") if offer.is_delta else nullcontext():
            content = offer.content()
        self._needed = content.size
        return content

    def _require_room(self, content: Content) -> None:
        """Before engines take what could have no files."""
        folder, free = self.means.folder, free_bytes(self.means.folder.path)
        if free < self._needed and not folder.slots.has(content.weights.layout):
            raise no_space(folder.path, self._needed, free)

    def _writer(self, progress: Callable[[Progress], None] | None) -> VersionWriter:
        return VersionWriter(
            folder=self.means.folder,
            order=self.order,
            metadata=self.metadata,
            progress=progress,
            mappings=self.means.mappings,
        )

    @property
    def _id(self) -> str:
        return version_id(self.means.folder.run, self.order)

    @contextmanager
    def _offered(self, weights: Any) -> Generator[Offer, None, None]:
        """What is to be written. At the end of the block the weights are needed no more."""
        try:
            yield self._offer(weights)
        finally:
            self.means.reading.let_go()

    def _offer(self, weights: Any) -> Offer:
        content = self.means.reading.content(weights)
        if self.delta == "never":
            self.means.deltas.forget()
            return Offer(content=lambda: content)
        with self._laps.lap("compare"):
            return self.means.deltas.offer(content, self._id)

    @contextmanager
    def _guarded(self) -> Generator[None, None, None]:
        try:
            yield
        except OSError as error:
            self.means.deltas.forget()
            self.trace.end(error)
            raise self._refusal(error) from error
        except BaseException as error:
            self.means.deltas.forget()
            self.trace.end(error)
            raise

    def _refusal(self, error: OSError) -> StorageError:
        folder = self.means.folder
        if error.errno in _FULL:
            return no_space(folder.path, self._needed, free_bytes(folder.path))
        return StorageError(f"{folder.folder_of(self.order)} could not be written: {error}")

    def _publication(self, offer: Offer, written: Written) -> Publication:
        if self.begun is not None:
            _log.warning("%s", self.begun)
        run, manifest = self.means.folder.run, written.manifest
        self.trace.tell({"version": self._id, "kind": manifest.kind.value, "bytes": written.bytes})
        path = f"{run}/{version_folder(self.order)}"
        return Publication(
            run=run,
            generation=self.order.generation,
            step=self.order.step,
            path=self.means.folder.folder_of(self.order),
            version_id=self._id,
            bytes=written.bytes,
            digest=manifest.digest,
            timings=self._laps.times | written.timings,
            notice=Notice(
                run=run,
                step=self.order.step,
                path=path,
                kind=manifest.kind,
                base=manifest.base,
                allow_missing=self.allow_missing,
                allow_extra=self.allow_extra,
                metadata=self.metadata,
                publish_ms=self._laps.since_begin,
                digest=manifest.digest,
                root=name_of(self.means.folder.root),
                engines=self.means.engines,
            ),
            kind=manifest.kind,
            base=manifest.base,
            why_full=offer.why_full,
            density=offer.density,
            connection=self.means.connection,
            begun=self.begun,
        )
