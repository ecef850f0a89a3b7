"""A trainer's tensors, handed over: offered, announced, and taken back when every engine that could has answered.

    begun      the offer's file is there, and the service was told: engines copy from here on
    over       the tensors are the trainer's own again
    failed     the service is told that the version's files will never come

What stands in the way is said and no error: the version reaches engines by its files then, a little later.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from refitd_client.checkpoint.finite import NO_RULE, rule_of
from refitd_client.contract.naming import Order, version_folder, version_id
from refitd_client.contract.states import Kind, WaitOutcome
from refitd_client.contract.wire import Notice
from refitd_client.errors import ServiceError
from refitd_client.http.client import open_client
from refitd_client.http.connection import Connection
from refitd_client.http.handshake import name_of
from refitd_client.tensors.source import TensorSource
from refitd_client.transport.ipc.device import DriverError
from refitd_client.transport.ipc.making import Layouts
from refitd_client.transport.ipc.offer_file import ExportedTensors
from refitd_client.transport.ipc.secret import SecretRefusedError, read_secret
from refitd_client.transport.ipc.shared import NotSharedError
from refitd_client.write.proof import not_finite

ANSWER_SECONDS = 20.0  # in which engines are to have answered
BACK_SECONDS = 10.0  # in which an engine that copies is to have ended, when the offer is withdrawn

_log = logging.getLogger("refitd_client")


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """What came of an offer: the engines that serve it now, and why not all do, or none.

    `timings` are milliseconds of `offer` (fingerprints, the offer's file), `notice`, and `taken`: from the call of
    `publish` until the last engine had answered.
    """

    engines: tuple[str, ...] = ()
    reason: str | None = None
    timings: Mapping[str, float] | None = None


class NotOfferedError(Exception):
    """Why there is no offer, as a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a version goes, and who is told. `metadata` are the version's, by which its trace is begun at once."""

    root: Path
    run: str
    order: Order
    connection: Connection
    metadata: dict[str, str] = field(default_factory=dict[str, str])
    allow_missing: bool = False
    allow_extra: bool = False
    engines: Literal["mine"] | None = None

    @property
    def folder(self) -> Path:
        """The run's."""
        return self.root / self.run

    @property
    def version(self) -> str:
        """The version's id."""
        return version_id(self.run, self.order)

    @property
    def notice(self) -> Notice:
        """What is said of it before its files are there."""
        path = f"{self.run}/{version_folder(self.order)}"
        return Notice(
            run=self.run,
            step=self.order.step,
            path=path,
            kind=Kind.HANDOVER,
            allow_missing=self.allow_missing,
            allow_extra=self.allow_extra,
            metadata=self.metadata,
            root=name_of(self.root),
            engines=self.engines,
        )

    def tell(self, notice: Notice, seconds: float) -> None:
        """Send a notice.

        Raises:
            ServiceError: it is refused, or nobody answers. OSError, ValueError: there is no token to send.
        """
        with open_client(self.connection, try_for=seconds) as client:
            client.announce(notice)

    def fail(self, reason: str) -> None:
        """Tell the service that the files will never come. It finds out by the next version if this is lost."""
        try:
            self.tell(replace(self.notice, failed=reason[:500]), ANSWER_SECONDS)
        except (ServiceError, OSError, ValueError) as error:
            _log.warning("the service was not told that %s failed: %s", self.version, error)


class Hand:
    """One offer, under way. `over` must be called, or `withdraw`. `fingerprints` are those of the tensors, by name."""

    def __init__(self, place: Place, sources: Sequence[TensorSource], layouts: Layouts, *, check_finite: bool) -> None:
        """Offer, and tell the service. `layouts` are those of the offers before.

        Raises:
            InvalidWeightsError: a tensor is not finite.
            NotOfferedError: there is nothing to export, or no service to ask.
        """
        self._place, self._began = place, time.monotonic()
        self.timings: dict[str, float] = {}
        self._exported, self.fingerprints = _exported(place, sources, layouts, check_finite=check_finite)
        self._lap("offer")
        try:
            place.tell(replace(place.notice, offer=self._exported.path.name), ANSWER_SECONDS)
        except BaseException as error:
            self.withdraw()
            if isinstance(error, (ServiceError, OSError, ValueError)):
                raise NotOfferedError(f"the service was not told: {error}") from error
            raise
        self._lap("notice")

    def over(self) -> Handed:
        """Wait until engines have answered, as long as that may take, and take the tensors back."""
        try:
            engines, reason = self._answers()
        finally:
            self._lap("taken")
            is_back = self.withdraw()
        if not is_back:
            reason = f"an engine still reads the tensors after {BACK_SECONDS:g} s: what it copied counts for nothing"
        return Handed(engines=engines, reason=reason, timings=self.timings)

    def withdraw(self) -> bool:
        """Take the tensors back. False where an engine has not let go of them in time."""
        return self._exported.take_back(BACK_SECONDS)

    def _answers(self) -> tuple[tuple[str, ...], str | None]:
        left = ANSWER_SECONDS
        try:
            with open_client(self._place.connection, try_for=left) as client:
                result = client.wait(self._place.version, "taken", left)
        except (ServiceError, OSError, ValueError) as error:
            return (), f"the service does not say who has taken it: {error}"
        said = result.version
        engines = tuple(engine.id for engine in said.engines if engine.serves)
        if result.outcome is not WaitOutcome.TAKEN:
            return engines, f"not every engine has answered in {ANSWER_SECONDS:g} s ({result.outcome})"
        others = [f"{engine.id}: {engine.reason or engine.state}" for engine in said.engines if not engine.serves]
        none = "no engine of the run is known to the service" if not said.engines else None
        return engines, "; ".join(others)[:1000] or none

    def _lap(self, name: str) -> None:
        self.timings[name] = (time.monotonic() - self._began) * 1000


def _exported(
    place: Place, sources: Sequence[TensorSource], layouts: Layouts, *, check_finite: bool
) -> tuple[ExportedTensors, dict[str, int]]:
    if cast := next((source.entry.name for source in sources if not source.is_view), None):
        raise NotOfferedError(f"tensor {cast} would be exported as it lies, and is not published as it lies")
    tensors = {source.entry.name: source.tensor() for source in sources}
    rules = [rule_of(source.entry.dtype) if check_finite else NO_RULE for source in sources]
    try:
        looked = layouts.look(tensors, rules)
        found = looked.scan()
        for name, each in zip(tensors, found, strict=True):
            if each.nonfinite:
                raise not_finite(name, each.nonfinite)
        fingerprints = [each.fingerprint for each in found]
        offer = looked.offer(place.version, fingerprints)
        return ExportedTensors(place.folder, offer, read_secret(place.root)), dict(
            zip(tensors, fingerprints, strict=True)
        )
    except (DriverError, NotSharedError, SecretRefusedError, OSError) as error:
        raise NotOfferedError(f"the tensors cannot be exported: {error}") from error
