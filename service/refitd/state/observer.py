"""The port to what follows the store: targets, metrics, traces, notifications."""

from typing import Protocol

from refitd.state.records import AttemptRecord, EngineRecord, RolloutRecord
from refitd.state.version import VersionRecord
from refitd_client.contract.wire import Event


class Observer(Protocol):
    """Is called for each change right after it took effect, on the loop's thread.

    The change need not be durable yet. An observer must not raise, block, or change the store.
    """

    def version_changed(self, before: VersionRecord | None, after: VersionRecord) -> None:
        """A version is new, or is not what it was."""
        ...

    def engine_changed(self, before: EngineRecord | None, after: EngineRecord) -> None:
        """An engine is new, or is not what it was."""
        ...

    def engine_dropped(self, engine: EngineRecord) -> None:
        """An engine is not named any more."""
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


class SilentObserver:
    """Does nothing at any change: the base of an observer that follows some of them."""

    def version_changed(self, before: VersionRecord | None, after: VersionRecord) -> None:
        """See `Observer`."""

    def engine_changed(self, before: EngineRecord | None, after: EngineRecord) -> None:
        """See `Observer`."""

    def engine_dropped(self, engine: EngineRecord) -> None:
        """See `Observer`."""

    def rollout_changed(self, rollout: RolloutRecord) -> None:
        """See `Observer`."""

    def attempt_changed(self, attempt: AttemptRecord) -> None:
        """See `Observer`."""

    def decided(self, event: Event) -> None:
        """See `Observer`."""
