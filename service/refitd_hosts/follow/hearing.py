"""When the upstream was heard last, and what is wrong with what it says."""

from refitd.clock import Clock
from refitd.state.faults import UpstreamWord
from refitd_hosts.follow.upstream import UpstreamRun

QUIET_SECONDS = 10.0  # without an answer, after which that is a fault


class Hearing:
    """What became of the last looks at the upstream. `heard_at` is when one was answered (RFC 3339), None for never;
    `unclear` is why the answer does not say what to follow, in a sentence.
    """

    def __init__(self, clock: Clock) -> None:
        """Nothing was heard yet."""
        self._clock = clock
        self._heard: float | None = None
        self._taken: float | None = None
        self._why: str | None = None
        self.heard_at: str | None = None
        self.unclear: str | None = None

    def answered(self) -> None:
        """The upstream has said what it has."""
        self._why = self.unclear = None
        self._heard, self.heard_at = self._clock.monotonic(), self._clock.now()

    def took_report(self) -> None:
        """The upstream has taken a report of this host."""
        self._taken = self._clock.monotonic()

    def failed(self, why: str) -> None:
        """It did not answer."""
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

    def word(
        self,
        name: str,
        run: str | None,
        offered: UpstreamRun | None,
        *,
        leads: bool,
        wanted: str | None,
        pulling: str | None,
        disobeyed: str | None,
    ) -> UpstreamWord:
        """Return what is known of the upstream now.

        Args:
            name: what sentences call it.
            run: the run that is followed.
            offered: what the upstream has said of it last.
            leads: whether it says what is served here.
            wanted: the id of the version that this host is to serve.
            pulling: the id of the version that is pulled.
            disobeyed: why engines here do not go where it wants.
        """
        return UpstreamWord(
            name=name,
            run=run,
            silent_since=self.silent_since,
            is_paused=offered is not None and offered.is_paused,
            leads=leads,
            wanted=wanted,
            elsewhere=None if offered is None else offered.desired,
            pulling=pulling,
            has_ended=self.heard_at is not None and (offered is None or offered.is_closed),
            listed=self._listed(offered),
            disobeyed=disobeyed,
            reported=self._taken,
        )

    def _listed(self, offered: UpstreamRun | None) -> frozenset[str] | None:
        if offered is None:
            return None if self.heard_at is None else frozenset()
        return frozenset(version.id for version in offered.versions)
