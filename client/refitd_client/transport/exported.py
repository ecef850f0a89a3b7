"""Tensors on their way into an offer: of this process, or of all ranks of a trainer; and how they are sent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from refitd_client.checkpoint.finite import NO_RULE, rule_of
from refitd_client.fingerprint import Scan
from refitd_client.transport.group.child import TransferSent
from refitd_client.transport.group.sending import Destination, GroupSender, NoTransferError, Sending
from refitd_client.transport.ipc.exported_memory import LayoutCache, PreparedOffer
from refitd_client.transport.ipc.offer import Offer
from refitd_client.write.content import TensorShards, Weights


@dataclass(slots=True)
class HandoverState:
    """What a publisher keeps from one hand-over to the next.

    `due`: the files of the last one were not written. `since` counts the versions without files since one had some,
    None before the first. `layouts` know where its tensors lie, `sender` sends them over process groups.
    `reason` is what was logged last of why versions are not handed over.
    """

    due: bool = False
    reason: str | None = None
    since: int | None = None
    layouts: LayoutCache = field(default_factory=LayoutCache)
    sender: GroupSender = field(default_factory=GroupSender)

    def sends(self, offer: Offer, to: Destination, tensors: Mapping[str, Any]) -> Offer:
        """The offer with how its tensors are sent.

        Raises:
            NoTransferError: they cannot be.
        """
        return replace(offer, transfer=self.sender.begin(to, tensors))

    def close(self) -> None:
        """End the process that sends."""
        self.sender.close()


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
        """The fingerprints by name, in the version's order, and how many elements are not finite.

        Raises:
            NoTransferError, DriverError, NotSharedError: they cannot be exported.
        """
        ...

    def offer(self, version: str, fingerprints: Sequence[int]) -> Offer:
        """The offer, with the transfer where they are sent to ranks elsewhere. Raises as `scan`."""
        ...

    def send(self, root: Path, offer: str) -> UnderWay | None:
        """Begin to send them, when the service was told; None where they are not sent.

        Args:
            root: the folder beneath which the offer's file is.
            offer: its path.
        """
        ...


@runtime_checkable
class ShardsOfRanks(Weights, Protocol):
    """Weights of which each rank of a trainer has a part (`sharded/`)."""

    def exported(self, destination: Destination | None) -> Exported:
        """On their way to the receivers."""
        ...

    def scanned(self) -> Weights:
        """The same, whose fingerprints are known, to be written."""
        ...

    def to_be_scanned(self) -> Weights:
        """The same, to be written with fingerprints."""
        ...


class TensorsHere:
    """Tensors that this process has whole."""

    def __init__(self, weights: TensorShards, destination: Destination | None, state: HandoverState) -> None:
        self._weights, self._destination, self._state = weights, destination, state
        self._tensors: Mapping[str, Any] = {}
        self._prepared: PreparedOffer | None = None

    def scan(self) -> Mapping[str, Scan]:
        sources, state = self._weights.sources, self._state
        if cast := next((source.entry.name for source in sources if not source.is_view), None):
            raise NoTransferError(f"tensor {cast} would be exported as it lies, and is not published as it lies")
        self._tensors = {source.entry.name: source.tensor() for source in sources}
        if self._destination is not None:
            self._tensors = state.sender.sharable(self._tensors)
        rules = [rule_of(source.entry.dtype) if self._weights.check_finite else NO_RULE for source in sources]
        self._prepared = state.layouts.prepare(self._tensors, rules)
        return dict(zip(self._tensors, self._prepared.scan(), strict=True))

    def offer(self, version: str, fingerprints: Sequence[int]) -> Offer:
        if self._prepared is None:
            raise NoTransferError("the tensors were not scanned")
        offer = self._prepared.offer(version, fingerprints)
        if self._destination is None:
            return offer
        return self._state.sends(offer, self._destination, self._tensors)

    def send(self, root: Path, offer: str) -> Sending | None:
        if self._destination is None:
            return None
        return Sending(partial(self._state.sender.send, root, offer))
