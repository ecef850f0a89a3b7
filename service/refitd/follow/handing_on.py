"""What a follower hands on of a version that is not validated here yet: from the start of its pull to the verdict.

asked early    who asks may have heard of the version before this host did: it waits a little for the pull to begin
pulled         blocks are handed on as they are found right (`arrival.py`), also while the catalog looks at them
judged         a good version is handed on as a version from then on, any other not at all
"""

from collections.abc import Callable

from refitd.follow.arrival import Arrival
from refitd.follow.puller import Puller
from refitd.policy.pulls import HELD
from refitd.state.observer import Notifier
from refitd.state.store import Store
from refitd_client.contract.states import VersionState

ARRIVES_SECONDS = 4.0  # for which somebody who asks for a version waits until its pull begins here
_LOOKED_AT = frozenset({VersionState.ANNOUNCED, VersionState.SETTLING, VersionState.VALIDATING})


class HandingOn:
    """Gives what has arrived to others, until there is a verdict."""

    def __init__(self, store: Store, puller: Puller, wake: Notifier, is_pulling: Callable[[], bool]) -> None:
        """Hand on nothing yet.

        Args:
            store: what the service knows.
            puller: pulls, or has pulled.
            wake: notified when the follower is to look at its upstream at once.
            is_pulling: whether a pull is under way.
        """
        self._store = store
        self._puller = puller
        self._wake = wake
        self._is_pulling = is_pulling

    async def arrival(self, version: str) -> Arrival | None:
        """What others may have of a version that is not validated here yet. Waits a little for its pull to begin."""
        if version not in self._store.versions:
            self._wake.notify()  # who asks has heard of it: look now
        until = self._store.clock.monotonic() + ARRIVES_SECONDS
        while True:
            seen = self._puller.began.count
            known = self._store.versions.get(version)
            here = self._puller.arrival(version)
            if here is not None or (known is not None and known.state in HELD):
                return here
            if (left := until - self._store.clock.monotonic()) <= 0:
                return None
            await self._puller.began.wait_after(seen, within=left)

    async def run_forever(self) -> None:
        """Hand nothing on any more of what was judged, until cancelled."""
        seen = -1
        while True:
            seen = await self._store.changed.wait_after(seen)
            self._settle()

    def _settle(self) -> None:
        transfer = self._puller.transfer
        if transfer is None or self._is_pulling():
            return
        record = self._store.versions.get(transfer.arrival.version)
        if record is None or record.state not in _LOOKED_AT:
            self._puller.settled()
