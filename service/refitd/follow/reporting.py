"""Tells the upstream what this host has, and leases what it pulls there.

The answer says from whom to pull, and whether the upstream leads this host.
"""

from collections.abc import Callable

import structlog

from refitd.follow.sources import FollowedSources
from refitd.follow.upstream import UnreachableError, UpstreamError
from refitd_client.contract.follow import FollowerReport, ReportAnswer

log = structlog.get_logger("refitd")


class UpstreamReporter:
    """Reports when something has changed, and well before a lease ends."""

    def __init__(
        self,
        sources: FollowedSources,
        tell: Callable[[], FollowerReport],
        heard: Callable[[str | None, ReportAnswer], None],
        refused: Callable[[], None],
    ) -> None:
        """Send nothing yet.

        Args:
            sources: hear from whom to pull, and notify when the upstream is to hear of something.
            tell: makes the report of this moment.
            heard: gets each answer, with the run of the report.
            refused: is called where the upstream takes no such report, and not only does not answer now.
        """
        self._sources = sources
        self._tell = tell
        self._heard = heard
        self._refused = refused
        self._lease_seconds = 30.0

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            seen = self._sources.told.count
            await self.report()
            await self._sources.told.wait_after(seen, within=self._lease_seconds / 3)

    async def report(self) -> None:
        """Report now. An upstream that does not take it hears the next one."""
        told = self._tell()
        try:
            answer: ReportAnswer = await self._sources.upstream.report(told)
        except UpstreamError as error:
            log.debug("the upstream did not take a report", reason=str(error))
            if not isinstance(error, UnreachableError):
                self._refused()
            return
        self._lease_seconds = max(1.0, answer.lease_seconds)
        self._sources.answered(answer)
        self._heard(told.run, answer)
