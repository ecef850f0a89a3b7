"""How other parts follow the store: observers are called with each change, notifiers wake the tasks that wait."""

import asyncio
from collections import deque
from contextlib import suppress

from refitd.state.records import AttemptRecord, EngineRecord, RolloutRecord
from refitd.state.version import VersionRecord
from refitd_client.contract.wire import Event


class Observer:
    """Base class: is called for each change right after it took effect, on the loop's thread. Does nothing by itself.

    The change need not be durable yet. An observer must not raise, block, or change the store.
    """

    def version_changed(self, before: VersionRecord | None, after: VersionRecord) -> None:
        """A version is new, or is not what it was."""

    def engine_changed(self, before: EngineRecord | None, after: EngineRecord) -> None:
        """An engine is new, or is not what it was."""

    def engine_dropped(self, engine: EngineRecord) -> None:
        """An engine is not named any more."""

    def rollout_changed(self, rollout: RolloutRecord) -> None:
        """The newest rollout of a run is new, or is not what it was."""

    def attempt_changed(self, attempt: AttemptRecord) -> None:
        """A load begins (its outcome is None), or has ended."""

    def decided(self, event: Event) -> None:
        """Something was written into the log of decisions."""


WOKEN_AT_A_TIME = 16


class Notifier:
    """Notifications are counted, so that one between a look and the wait for the next is not lost.

    Of many tasks that wait a few are woken in each turn of the loop: a thousand that all go on in one turn would keep
    everything else waiting, requests to the API among it.

    >>> seen = notifier.count
    >>> look()
    >>> seen = await notifier.wait_after(seen, within=2.0)
    """

    def __init__(self) -> None:
        self.count = 0
        self._waiting: dict[asyncio.Future[None], None] = {}  # in order: the first that waits is woken first
        self._to_wake: deque[asyncio.Future[None]] = deque()

    def notify(self) -> None:
        """Wake every task that waits. Call it on the event loop's thread."""
        self.count += 1
        is_waking = bool(self._to_wake)
        self._to_wake.extend(self._waiting)
        self._waiting.clear()
        if not is_waking:
            self._wake_some()

    def _wake_some(self) -> None:
        for _ in range(min(WOKEN_AT_A_TIME, len(self._to_wake))):
            future = self._to_wake.popleft()
            if not future.done():
                future.set_result(None)
        if self._to_wake:
            self._to_wake[0].get_loop().call_soon(self._wake_some)

    async def wait_after(self, seen: int, within: float | None = None) -> int:
        """Wait until there were more notifications than `seen`, at most `within` seconds; return the new count."""
        if self.count == seen and (within is None or within > 0):
            future = asyncio.get_running_loop().create_future()
            self._waiting[future] = None
            try:
                # Not wait_for: up to Python 3.11 it swallows a cancellation that comes together with the notification.
                with suppress(TimeoutError):
                    async with asyncio.timeout(within):
                        await future
            finally:
                self._waiting.pop(future, None)
        return self.count
