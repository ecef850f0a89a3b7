"""What rings add to publishing, as the publisher calls it. Each is registered under a name of `refitd_client.parts`."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from refitd_client.contract.naming import Order
from refitd_client.contract.wire import Notice
from refitd_client.errors import PublishError
from refitd_client.http.connection import Connection
from refitd_client.http.publisher_client import ReceiversQuery
from refitd_client.parts import part
from refitd_client.publish.options import PublishOptions
from refitd_client.publish.publication import Handed
from refitd_client.publish.run_folder import RunFolder
from refitd_client.ways import BY_FILES, Choice, Transport
from refitd_client.write.content import Content, PlannedContent

StagedT = TypeVar("StagedT")
NO_DELTAS = "this installation of refitd makes no deltas"
_REASON = 500  # characters of a reason in a manifest: it may quote an error


@dataclass(frozen=True, slots=True)
class Full:
    """Publish in full. `why` is a sentence for people."""

    why: str


AskBase = Callable[[], str | Full]
"""Returns the id of the version that a delta has to lead from, or why the next version has to be full."""


class Deltas(Protocol):
    """What makes deltas of one publisher's versions."""

    def offer(self, content: Content, version: str) -> PlannedContent:
        """Decide how `version` goes out, whose full content is `content`. Call `committed` or `forget` afterwards.

        Raises:
            InvalidWeightsError: a changed element is NaN or infinite, and such weights are to be refused.
        """
        ...

    def committed(self, version: str) -> None:
        """The version is durable: the next delta may lead from it."""
        ...

    def forget(self, *, failed: bool) -> None:
        """Begin anew. `failed`: the publication before has failed; else it was made without comparing."""
        ...

    def refuse(self, why: str) -> None:
        """Make no more deltas: the service does not carry them out."""
        ...


class FullVersions:
    """`Deltas` of a tree without the ring: each version is full."""

    def offer(self, content: Content, version: str) -> PlannedContent:
        return PlannedContent(content=lambda: content, kind=content.claims.kind, why_full=NO_DELTAS)

    def committed(self, version: str) -> None: ...

    def forget(self, *, failed: bool) -> None: ...

    def refuse(self, why: str) -> None: ...


def deltas_of(options: PublishOptions, connection: Connection | None, run: str, base: AskBase | None) -> Deltas:
    """Make what makes a publisher's deltas (part `deltas`).

    Args:
        base: says what a delta leads from; None has the service asked.
    """
    make = part("deltas")
    return FullVersions() if make is None else make(options, connection, run, base)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishRoute:
    """The way that a publication takes, and to which ranks it sends.

    `choice` is the transport with the reason for it. `destination` is the memory ring's. `instead` says why the files
    go alone where more was asked for.
    """

    choice: Choice
    destination: Any = None
    instead: str | None = None

    @property
    def handover(self) -> bool:
        """Whether engines take it from the trainer's memory, before its files are written."""
        return self.choice.transport not in BY_FILES

    @property
    def metadata(self) -> dict[str, str]:
        """What the version's metadata says of it."""
        return {"transport": self.choice.transport, "transport_why": (self.instead or self.choice.why)[:_REASON]}


class MemoryExport(Protocol):
    """One version on its way from the trainer's memory."""

    def of(self, content: Content, stage: Callable[[Content], StagedT]) -> tuple[StagedT | None, Handed]:
        """Offer the tensors until engines have answered. `stage` takes what the version's files need of the tensors.

        Returns:
            What `stage` has returned, None where the version is to have no files; and what the engines answered.

        Raises:
            InvalidWeightsError: a tensor is not finite.
            Exception: what `stage` raises.
        """
        ...

    def failed(self, error: BaseException) -> None:
        """Tell the service that the version's files will not come, if it was told of an offer."""
        ...


class MemoryWay(Protocol):
    """What brings one publisher's versions to engines from the trainer's memory (part `memory`: makes it, of a folder).

    `due`: the files of the last version were not written. `since` counts the versions without files since one had some,
    None before the first.
    """

    due: bool
    since: int | None

    def route(self, transport: Transport, weights: Any, receivers: ReceiversQuery) -> PublishRoute:
        """Decide how a publication goes, which is not to go by files alone.

        Raises:
            TransportRefusedError: what is asked for cannot work between this trainer and these engines.
        """
        ...

    def export(
        self, notice: Notice, version: str, root: Path, connection: Connection, destination: Any, *, wants_files: bool
    ) -> MemoryExport:
        """Begin nothing; what is returned offers a version.

        Args:
            notice: what the service is told, without the offer's name.
            version: its id.
            root: the folder that the service watches.
            destination: a route's.
            wants_files: whether files are to follow also where all engines take it.
        """
        ...

    def close(self) -> None: ...


class StoreTarget(Protocol):
    """One run in an object store. Calls come from one thread at a time; all but `url` and `close` raise BucketError."""

    def url(self, order: Order) -> str:
        """Return where a version's objects lie."""
        ...

    def is_used(self, order: Order) -> bool:
        """Whether an upload of this version was ever begun, perhaps by a publisher that is dead."""
        ...

    def base(self) -> str | Full:
        """Return what a delta leads from."""
        ...

    def publish(self, run: RunFolder, order: Order, manifest: bytes) -> None:
        """Upload a committed version, make it count, and remove its local folder. If that fails it counts nowhere.

        Raises:
            RunBusyError: another publisher has the run.
        """
        ...

    def close(self) -> None: ...


class ObjectStore(Protocol):
    """An object store that versions go to, by way of the local folder `spool` (part `stores`: makes it, of a URL)."""

    spool: Path

    def begin(self, folder: RunFolder, keep: int) -> StoreTarget:
        """Begin to publish a run, whose newest `keep` versions stay.

        Raises:
            BucketError: the store cannot be read or written, or does not keep conditions of writes.
        """
        ...


class WeightSource(Protocol):
    """What vLLM's trainers pass for weights: it describes its parameters, and yields them whole with their names."""

    def metadata(self) -> Sequence[Any]: ...

    def __iter__(self) -> Iterator[tuple[str, Any]]: ...


class SourceReading(Protocol):
    """A source of weights, read for one version by all ranks together (part `sources`: makes it, of this rank's)."""

    @property
    def word(self) -> Any:
        """What this rank says of its source."""
        ...

    def shares(self, words: Iterable[Any]) -> Sequence[Any]:
        """Decide what each rank keeps, by the words of all.

        Raises:
            InvalidWeightsError: ranks describe different parameters, or none holds one of them.
        """
        ...

    def kept(self, share: Any) -> Mapping[str, Any]:
        """Read the source to its end, which all ranks do alike, and return the tensors of a share.

        Raises:
            InvalidWeightsError: what it yields is not what it describes.
        """
        ...


def reading_of(source: WeightSource) -> SourceReading:
    """Begin to read a source.

    Raises:
        PublishError: this tree is without the ring.
        InvalidWeightsError: what the source says of itself contradicts itself.
    """
    if (begin := part("sources")) is None:
        raise PublishError("this installation of refitd reads no sources of weights: pass a state dict")
    return begin(source)
