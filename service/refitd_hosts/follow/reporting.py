"""Tells the upstream what this host is at, leases what it pulls there, and takes the reply.

Both sides repeat what is so, so that a report or a reply that is lost costs the time to the next.
"""

from collections.abc import Callable

import structlog

from refitd_client.contract.follow import HostReply, HostReport
from refitd_hosts.follow.sources import FollowedSources
from refitd_hosts.follow.upstream import UnreachableError, UpstreamError

RESTS_SECONDS = 10.0  # between two reports
BUSY_SECONDS = 1.0  # while something is under way, or the last report was not taken; more where the upstream says so

log = structlog.get_logger("refitd")


class UpstreamReporter:
    """Reports when something has changed, and at intervals. `fault` is why the upstream takes no reports."""

    def __init__(
        self,
        sources: FollowedSources,
        tell: Callable[[], HostReport],
        heard: Callable[[HostReply], None],
        is_busy: Callable[[], bool],
        refused: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Send nothing yet.

        Args:
            sources: the upstreams, which notify when the upstream is to hear of something.
            tell: makes the report of this moment.
            heard: gets each reply to the newest report.
            is_busy: whether something is under way.
            refused: gets the name of an upstream that takes no reports of this host.
        """
        self._sources = sources
        self._tell = tell
        self._heard = heard
        self._is_busy = is_busy
        self._refused = refused
        self._is_soon = False
        self._busy_seconds = BUSY_SECONDS
        self._sent = 0  # reports
        self._answered = 0  # the newest report that has a reply
        self.fault: str | None = None

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            seen = self._sources.told.count
            await self.report()
            wait = self._busy_seconds if self._is_soon or self._is_busy() else RESTS_SECONDS
            await self._sources.told.wait_after(seen, within=wait)

    async def report(self) -> None:
        """Report now. An upstream that does not take it hears the next one.

        Two reports may be under way, as one of them asks for a turn to pull. Their replies may change places: a reply
        to a report that was sent before an answered one counts for nothing. It may order what was served before.
        """
        upstream = self._sources.upstream
        self._sent += 1
        number = self._sent
        try:
            reply = await upstream.report(self._tell())
        except UpstreamError as error:
            log.debug("the upstream did not take a report", reason=str(error))
            self.fault, self._is_soon = None if isinstance(error, UnreachableError) else str(error), True
            self._busy_seconds = BUSY_SECONDS
            if self.fault is not None and upstream is self._sources.upstream:
                self._refused(upstream.name)
            return
        if number < self._answered:
            return
        self._answered = number
        self.fault, self._is_soon = None, reply.soon
        self._busy_seconds = min(RESTS_SECONDS, max(BUSY_SECONDS, reply.busy_seconds))
        if upstream is self._sources.upstream:
            self._heard(reply)
