"""Tells the upstream what this host has, and leases what it pulls there. The answer says from whom to pull."""

from collections.abc import Callable

import structlog

from refitd.follow.sources import FollowedSources
from refitd.follow.upstream import UpstreamError
from refitd.state.observer import Notifier
from refitd_client.contract.follow import FollowerReport, ReportAnswer

log = structlog.get_logger("refitd")


class Reporter:
    """Reports when something has changed, and well before a lease ends."""

    def __init__(self, sources: FollowedSources, tell: Callable[[], FollowerReport]) -> None:
        """Send nothing yet. `tell` makes the report of this moment."""
        self._sources = sources
        self._tell = tell
        self._changed = Notifier()
        self._lease_seconds = 30.0

    def changed(self) -> None:
        """Report soon: something has changed."""
        self._changed.notify()

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            seen = self._changed.count
            await self.report()
            await self._changed.wait_after(seen, within=self._lease_seconds / 3)

    async def report(self) -> None:
        """Report now. An upstream that does not take it hears the next one."""
        try:
            answer: ReportAnswer = await self._sources.upstream.report(self._tell())
        except UpstreamError as error:
            log.debug("the upstream did not take a report", reason=str(error))
            return
        self._lease_seconds = max(1.0, answer.lease_seconds)
        self._sources.named = answer.relays
