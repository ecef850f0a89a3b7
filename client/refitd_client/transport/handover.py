"""A version's tensors handed over to engines: offered, announced, and withdrawn when all engines have answered.

    begun      the offer's file is there, and the service was told: engines copy from here on
    complete   the tensors are the trainer's own again
    failed     the service is told that the version's files will never come

Engines on the trainer's host open its memory. To ranks that the publication names the tensors are sent over process
groups meanwhile (`transport.processes`): each has received them before its engine is asked to load.

If the tensors cannot be handed over, that is a reason in the result and no error: the version reaches engines by its
files then, a little later. The bytes are staged after the hand-over; of tensors that are sent as soon as all have
arrived, while engines load them. As engines may hear of the version as soon as it is offered, its name is used up from
then on. Where its files fail, the next version is durable before it is announced.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from refitd_client.checkpoint.finite import NO_RULE, rule_of
from refitd_client.contract.manifest import fitting_fingerprints
from refitd_client.contract.states import WaitOutcome
from refitd_client.contract.wire import Notice
from refitd_client.errors import ServiceError
from refitd_client.fingerprint import Scan
from refitd_client.http.connection import Connection
from refitd_client.http.publisher_client import ReceiversQuery, open_client
from refitd_client.publish.ports import PublishRoute, StagedT
from refitd_client.publish.publication import Handed
from refitd_client.transport import exporter
from refitd_client.transport.child import TransferSent
from refitd_client.transport.choice import Destination, decide_route
from refitd_client.transport.device import DriverError
from refitd_client.transport.memory import LayoutCache, NotSharedError, PreparedOffer
from refitd_client.transport.offer import GroupTransfer, Offer
from refitd_client.transport.offer_file import ExportedTensors, HandoverKeyRefusedError, read_secret
from refitd_client.transport.script import table_of_whole
from refitd_client.transport.sending import SEND_SECONDS, NoTransferError, Sending, TensorSender, places_of
from refitd_client.ways import Choice, Transport
from refitd_client.write.content import Content, TensorShards, WeightsOfRanks
from refitd_client.write.plan import not_finite

ANSWER_SECONDS = 20.0  # in which engines are to have answered
BACK_SECONDS = 10.0  # in which an engine that copies is to have ended, when the offer is withdrawn

_log = logging.getLogger("refitd_client")


class NotOfferedError(Exception):
    """Why there is no offer, as a sentence."""


class UnderWay(Protocol):
    """A transfer that was begun."""

    def is_sent(self) -> bool:
        """Whether it has ended, so that it reads the tensors no more. Waits for that, until `answered` is called."""
        ...

    def answered(self) -> None:
        """End the wait of `is_sent`, now or later: the engines have answered. For any thread."""
        ...

    def finish(self) -> TransferSent | NoTransferError:
        """What has come of it, without waiting for receivers any more."""
        ...


class Exported(Protocol):
    """The tensors of a version, on their way into an offer. Each method is called once, in this order."""

    def scan(self) -> Mapping[str, Scan]:
        """The fingerprints by name, in the version's order, and how many elements are not finite. Raises
        NoTransferError, DriverError, NotSharedError: they cannot be exported.
        """
        ...

    def offer(self, version: str, fingerprints: Sequence[int]) -> Offer:
        """The offer, with the transfer where they are sent to ranks elsewhere. Raises as `scan`."""
        ...

    def send(self) -> UnderWay | None:
        """Begin to send them, when the service was told; None where they are not sent."""
        ...


class TensorsHere:
    """Tensors that this process has whole (`Exported`)."""

    def __init__(self, weights: TensorShards, destination: Destination | None, state: "TrainerMemory") -> None:
        self._weights, self._destination, self._state = weights, destination, state
        self._prepared: PreparedOffer | None = None
        self._transfer: GroupTransfer | None = None

    def scan(self) -> Mapping[str, Scan]:
        sources, state = self._weights.sources, self._state
        if cast := next((source.entry.name for source in sources if not source.is_view), None):
            raise NoTransferError(f"tensor {cast} would be exported as it lies, and is not published as it lies")
        tensors: Mapping[str, Any] = {source.entry.name: source.tensor() for source in sources}
        if self._destination is not None:
            tensors = state.sender.sharable(tensors)
        rules = [rule_of(source.entry.dtype) if self._weights.check_finite else NO_RULE for source in sources]
        self._prepared = state.layouts.prepare(tensors, rules)
        return dict(zip(tensors, self._prepared.scan(), strict=True))

    def offer(self, version: str, fingerprints: Sequence[int]) -> Offer:
        if self._prepared is None:
            raise NoTransferError("the tensors were not scanned")
        offer = self._prepared.offer(version, fingerprints)
        if self._destination is None:
            return offer
        self._transfer = self._state.sender.open(self._destination, self._prepared.layout)
        return replace(offer, transfer=self._transfer)

    def send(self) -> Sending | None:
        prepared, transfer = self._prepared, self._transfer
        if prepared is None or transfer is None:
            return None
        sizes = [each.nbytes for each in prepared.layout.tensors]
        table = table_of_whole(sizes)
        return Sending(partial(self._state.sender.send, transfer, prepared.layout, table=table))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportTarget:
    """A version that is handed over, and the service to tell. `notice` is what it is told, without the offer.

    `destination` are ranks that it is sent to over a process group, None where engines open the trainer's memory.
    `wants_files`: files are to follow also where all engines take it.
    """

    notice: Notice
    version: str
    root: Path
    connection: Connection
    destination: Destination | None
    wants_files: bool

    def tell(self, *, offer: str | None = None, failed: str | None = None) -> None:
        """Send the notice of a version without files. Raises ServiceError: it is refused, or the service does not
        answer; OSError, ValueError: there is no token to send.
        """
        with open_client(self.connection, try_for=ANSWER_SECONDS) as client:
            client.announce(replace(self.notice, offer=offer, failed=failed))


@dataclass(slots=True, kw_only=True)
class TensorExport:
    """The hand-over of one version. `state` is the publisher's."""

    place: ExportTarget
    state: "TrainerMemory"
    _told: bool = field(default=False, init=False)

    def of(self, content: Content, stage: Callable[[Content], StagedT]) -> tuple[StagedT | None, Handed]:
        """Export the tensors until engines have answered. If nothing is exported, the result says why. `stage`: takes
        what its files need of the tensors. Returns what `stage` has returned, None where the version is to have no
        files; and the result of the hand-over. Raises InvalidWeightsError: a tensor is not finite; Exception: what
        `stage` raises.
        """
        weights = content.weights
        if not isinstance(weights, (TensorShards, WeightsOfRanks)):
            return stage(content), self._by_files("files are not exported: pass tensors")
        try:
            handover = Handover(self.place, self._exported(weights))
        except NotOfferedError as error:
            # The manifest gets fingerprints, as the offer would have had.
            handed = self._by_files(str(error))
            return stage(replace(content, weights=weights.to_be_scanned())), handed
        self._told, self.state.reason = True, None
        # The tensors were scanned for the offer and have not changed: they are not scanned again.
        claims = replace(content.claims, fingerprints=fitting_fingerprints(handover.fingerprints))
        content = replace(content, weights=weights.scanned(), claims=claims)
        try:
            if self.place.wants_files and handover.is_sent():
                staged = stage(content)
                return staged, handover.complete()
            handed = handover.complete()
        finally:
            handover.withdraw()
        return None if self._is_enough(handed) else stage(content), handed

    def _exported(self, weights: TensorShards | WeightsOfRanks) -> Exported:
        if isinstance(weights, TensorShards):
            return TensorsHere(weights, self.place.destination, self.state)
        return weights.exported(self.place.destination)

    def _is_enough(self, handed: Handed) -> bool:
        """Whether the version is to have no files, since all engines have it."""
        if self.place.wants_files or not handed.is_whole:
            return False
        self.state.since = (self.state.since or 0) + 1
        return True

    def _by_files(self, reason: str) -> Handed:
        level = logging.DEBUG if reason == self.state.reason else logging.WARNING
        _log.log(level, "%s is not handed over, and goes by its files: %s", self.place.version, reason)
        self.state.reason = reason
        return Handed(reason=reason)

    def failed(self, error: BaseException) -> None:
        """Tell the service that the files will not come, if it was told of an offer: engines may serve the version.

        If that is lost, the service finds out by the next version.
        """
        if not self._told:
            return
        self.state.due = True
        try:
            self.place.tell(failed=(str(error) or type(error).__name__)[:500])
        except (ServiceError, OSError, ValueError) as lost:
            _log.warning("the service was not told that %s failed: %s", self.place.version, lost)


class Handover:
    """An offer under way. Call `complete` or `withdraw`. `fingerprints` are those of the tensors, by name."""

    def __init__(self, target: ExportTarget, exported: Exported) -> None:
        """Offer the tensors, and tell the service. Raises InvalidWeightsError: a tensor is not finite; NotOfferedError:
        there is nothing to export, or the service cannot be told.
        """
        self._target, self._began = target, time.monotonic()
        self.timings: dict[str, float] = {}
        self._sending: UnderWay | None = None
        self._answers: Future[tuple[tuple[str, ...], str | None]] = Future()
        try:
            found = exported.scan()
            for name, each in found.items():
                if each.nonfinite:
                    raise not_finite(name, each.nonfinite)
            self.fingerprints = {name: each.fingerprint for name, each in found.items()}
            offer = exported.offer(target.version, list(self.fingerprints.values()))
            offer = replace(offer, files=target.wants_files)
            self._exported = ExportedTensors(target.root / target.notice.run, offer, read_secret(target.root))
        except (DriverError, NotSharedError, HandoverKeyRefusedError, NoTransferError, OSError) as error:
            raise NotOfferedError(f"the tensors cannot be exported: {error}") from error
        self._lap("offer")
        try:
            target.tell(offer=self._exported.path.name)
        except BaseException as error:
            self.withdraw()
            if isinstance(error, (ServiceError, OSError, ValueError)):
                raise NotOfferedError(f"the service was not told: {error}") from error
            raise
        try:
            self._sending = exported.send()
            self._lap("notice")
            if self._sending is not None:
                threading.Thread(target=self._ask, name="refitd-answers", daemon=True).start()
        except BaseException:
            self.withdraw()
            raise

    def is_sent(self) -> bool:
        """Whether all tensors were sent, so that only engines on this host may read them yet. Waits for that, or for
        the engines' answers.
        """
        return self._sending is not None and self._sending.is_sent()

    def complete(self) -> Handed:
        """Wait until engines have answered, and withdraw the offer.

        It waits for `ANSWER_SECONDS` at most, where the tensors are sent for `SEND_SECONDS`.
        """
        sent = None
        if self._sending is None:
            self._ask()
        try:
            engines, reason = self._answers.result()
        finally:
            if self._sending is not None:
                sent = self._sending.finish()
            is_back = self.withdraw()
        if isinstance(sent, NoTransferError):
            reason = f"nothing was sent: {sent}" if reason is None else f"{reason}; nothing was sent: {sent}"
        if not is_back:
            reason = f"an engine still reads the tensors after {BACK_SECONDS:g} s: what it copied counts for nothing"
        if not isinstance(sent, TransferSent):
            return Handed(engines=engines, reason=reason, timings=self.timings)
        return Handed(engines=engines, reason=reason, timings=self.timings, sent=sent.ms, sent_bytes=sent.nbytes)

    def withdraw(self) -> bool:
        """Take the tensors back. False where an engine still reads them after `BACK_SECONDS`."""
        return self._exported.take_back(BACK_SECONDS)

    def _ask(self) -> None:
        try:
            found = self._answered(ANSWER_SECONDS if self._sending is None else SEND_SECONDS)
        except BaseException as error:  # `complete` raises it
            self._answers.set_exception(error)
        else:
            self._lap("taken")
            self._answers.set_result(found)
        finally:
            if self._sending is not None:
                self._sending.answered()

    def _answered(self, within: float) -> tuple[tuple[str, ...], str | None]:
        """The engines that serve the version, and why others do not. `within` are seconds."""
        try:
            with open_client(self._target.connection, try_for=within) as client:
                result = client.wait(self._target.version, "taken", within)
        except (ServiceError, OSError, ValueError) as error:
            return (), f"the service does not say who has taken it: {error}"
        listed = result.version.engines
        engines = tuple(engine.id for engine in listed if engine.serves)
        if result.outcome is not WaitOutcome.TAKEN:
            return engines, f"not every engine has answered in {within:g} s ({result.outcome})"
        others = [f"{engine.id}: {engine.reason or engine.state}" for engine in listed if not engine.serves]
        if not self._target.wants_files:  # nothing else brings the version there
            others += [f"{name} follows the run, and gets versions by their files" for name in result.followers]
        none = "no engine of the run is known to the service" if not listed else None
        return engines, "; ".join(others)[:1000] or none

    def _lap(self, name: str) -> None:
        self.timings[name] = (time.monotonic() - self._began) * 1000


class TrainerMemory:
    """What brings one publisher's versions to engines from the trainer's memory (`MemoryWay`).

    `layouts` know where the tensors lay last, `sender` sends them over process groups. `reason` is what was logged last
    of why versions are not handed over.
    """

    def __init__(self, folder: Path) -> None:
        """Begin nothing. `folder` is the run's."""
        self._folder = folder
        self.sender, self.layouts = TensorSender(folder, "process"), LayoutCache()
        self.due = False
        self.since: int | None = None
        self.reason: str | None = None

    def route(self, transport: Transport, weights: Any, receivers: ReceiversQuery) -> PublishRoute:
        """As `MemoryWay.route`."""
        places = places_of(weights)
        if places is None:
            asked = None if transport == "auto" else f"transport={transport!r} takes tensors, and the weights are files"
            return PublishRoute(choice=Choice(transport="disk", why="the weights are files"), instead=asked)
        try:
            found = receivers.ask()
        except (ServiceError, OSError, ValueError) as error:
            by: Transport = "delta" if transport == "auto" and not places[0].is_rank else "disk"
            choice = Choice(transport=by, why="files need no answer of the service")
            return PublishRoute(choice=choice, instead=f"the service does not say who can receive: {error}")
        return decide_route(transport, places, found, urlsplit(receivers.connection.url).hostname or "")

    def export(
        self,
        notice: Notice,
        version: str,
        root: Path,
        connection: Connection,
        destination: Destination | None,
        *,
        wants_files: bool,
    ) -> TensorExport:
        """As `MemoryWay.export`."""
        place = ExportTarget(
            notice=notice,
            version=version,
            root=root,
            connection=connection,
            destination=destination,
            wants_files=wants_files,
        )
        return TensorExport(place=place, state=self)

    def close(self) -> None:
        """End what exports and sends."""
        self.sender.close()
        exporter.end(self._folder)
