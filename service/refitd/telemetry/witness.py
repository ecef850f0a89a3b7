"""The port to whoever listens to the ledger: metrics, traces, notifications."""

from typing import Protocol

from refitd.catalog.record import VersionRecord
from refitd.rollout.record import AttemptRecord, RolloutRecord
from refitd_client.contract.wire import Event


class Witness(Protocol):
    """Hears of each change right after it took effect, on the loop's thread.

    What it hears need not be durable yet. It must not raise, block, or change the ledger: nothing of the service may
    depend on whether anybody listens.
    """

    def version_changed(self, before: VersionRecord | None, after: VersionRecord) -> None:
        """A version is new, or is not what it was."""
        ...

    def rollout_changed(self, rollout: RolloutRecord) -> None:
        """The newest rollout of a run is new, or is not what it was."""
        ...

    def attempt_changed(self, attempt: AttemptRecord) -> None:
        """A load begins (its outcome is None), or has ended."""
        ...

    def decided(self, event: Event) -> None:
        """Something was written into the log of decisions."""
        ...


class Silent:
    """Listens to nothing: what a witness of single things begins with."""

    def version_changed(self, before: VersionRecord | None, after: VersionRecord) -> None:
        """See `Witness`."""

    def rollout_changed(self, rollout: RolloutRecord) -> None:
        """See `Witness`."""

    def attempt_changed(self, attempt: AttemptRecord) -> None:
        """See `Witness`."""

    def decided(self, event: Event) -> None:
        """See `Witness`."""
