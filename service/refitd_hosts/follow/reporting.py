"""Tells the upstream what this host is at, leases what it pulls there, takes the reply, and notes when it was heard.

Both sides repeat what is so, so that a report or a reply that is lost costs the time to the next.
"""

from collections.abc import Callable
from typing import Any

import structlog

from refitd.clock import Clock
from refitd_client.contract.follow import HostReply, HostReport
from refitd_hosts.follow.upstream import FollowedSources, UnreachableError, UpstreamError, UpstreamRun
from refitd_hosts.policy.upstream import UpstreamWord

RESTS_SECONDS = 10.0  # between two reports
BUSY_SECONDS = 1.0  # while something is under way, or the last report was not taken; more where the upstream says so
QUIET_SECONDS = 10.0  # without an answer, after which that is a fault

log = structlog.get_logger("refitd")


class UpstreamReporter:
    """Reports when something has changed, and at intervals. `fault` is why the upstream takes no reports.

    `tell` makes the report of this moment, and `heard` gets each reply to the newest one. `is_busy`: something is under
    way. `refused` gets the name of an upstream that takes no reports of this host.
    """

    def __init__(
        self,
        sources: FollowedSources,
        tell: Callable[[], HostReport],
        heard: Callable[[HostReply], None],
        is_busy: Callable[[], bool],
        refused: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._sources, self._tell, self._heard, self._is_busy, self._refused = sources, tell, heard, is_busy, refused
        self._is_soon = False
        self._busy_seconds = BUSY_SECONDS
        self._sent = 0  # reports
        self._answered = 0  # the newest report that has a reply
        self.fault: str | None = None

    async def run(self) -> None:
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


class Hearing:
    """What became of the last looks at the upstream. `heard_at` is when one was answered (RFC 3339), None for never;
    `unclear` is why the answer does not say what to follow, in a sentence.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heard: float | None = None
        self._taken: float | None = None
        self._why: str | None = None
        self.heard_at: str | None = None
        self.unclear: str | None = None

    def answered(self) -> None:
        self._why = self.unclear = None
        self._heard, self.heard_at = self._clock.monotonic(), self._clock.now()

    def took_report(self) -> None:
        self._taken = self._clock.monotonic()

    def failed(self, why: str) -> None:
        self._why = why

    @property
    def silent_since(self) -> str | None:
        """When it was heard last, "" where that was not since the start; None while it is heard.

        One that does not answer for some seconds is heard, if it has answered before.
        """
        is_quiet = self._heard is None or self._clock.monotonic() - self._heard >= QUIET_SECONDS
        return self.heard_at or "" if self._why is not None and is_quiet else None

    @property
    def fault(self) -> str | None:
        """What is wrong, in a sentence; None where it is heard, and says what can be followed."""
        since = self.silent_since
        if since is None:
            return self.unclear
        when = f"since {since}" if since else "since the start"
        return f"nothing was heard from an upstream {when}: {self._why}; engines stay on what was ordered last"

    def word(self, name: str, run: str | None, offered: UpstreamRun | None, **facts: Any) -> UpstreamWord:
        """What is known of the upstream now. `offered` is what it has said of the run last; `facts` are the others of
        `UpstreamWord`.
        """
        listed = None if offered is None else frozenset(version.id for version in offered.versions)
        return UpstreamWord(
            name=name,
            run=run,
            silent_since=self.silent_since,
            is_paused=offered is not None and offered.is_paused,
            elsewhere=None if offered is None else offered.desired,
            has_ended=self.heard_at is not None and (offered is None or offered.is_closed),
            listed=frozenset() if listed is None and self.heard_at is not None else listed,
            reported=self._taken,
            **facts,
        )
