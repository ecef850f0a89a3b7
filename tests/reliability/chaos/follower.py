"""The service's events, followed through all of its deaths."""

import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from contextlib import closing

from refitd_client import RefitClient
from refitd_client.contract.wire import Event
from refitd_client.errors import ServiceError
from refitd_client.http.exchange import RetryPolicy

QUICK = RetryPolicy(deadline=1.0, first_pause=0.01, longest_pause=0.05)


class Follower:
    """Collects all events since the start of the journal."""

    def __init__(self, url: str, token: str) -> None:
        self.events: list[Event] = []
        self._url, self._token = url, token
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Collect no more."""
        self._stop.set()

    @property
    def now(self) -> int:
        """The last event so far."""
        return self.events[-1].seq if self.events else 0

    def until(self, what: Callable[[Event], bool], after: int, within: float) -> Event | None:
        """Wait for an event behind `after`; None if it does not come."""
        with self._changed:
            return self._changed.wait_for(lambda: self.find(what, after), within)

    def find(self, what: Callable[[Event], bool], after: int) -> Event | None:
        """The first such event behind `after`."""
        first = bisect_right(self.events, after, key=lambda event: event.seq)
        return next((event for event in self.events[first:] if what(event)), None)

    def change(self, within: float) -> None:
        """Wait until there is news, at most so many seconds."""
        with self._changed:
            self._changed.wait(within)

    def _listen(self) -> None:
        while not self._stop.is_set():
            try:
                with (
                    RefitClient(self._url, token=self._token, retry=QUICK) as client,
                    closing(client.events(str(self.now))) as stream,
                ):
                    for event in stream:
                        self._hear(event)
            except ServiceError:
                time.sleep(0.02)

    def _hear(self, event: Event) -> None:
        with self._changed:
            if event.seq > self.now:
                self.events.append(event)
                self._changed.notify_all()
