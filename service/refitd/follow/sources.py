"""Whom a follower pulls from now: the upstream that answers, and the relays that it has named."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from refitd.follow.upstream import ByteSource, Upstream
from refitd.state.observer import Notifier
from refitd_client.contract.follow import Relay, ReportAnswer

log = structlog.get_logger("refitd")


@dataclass(frozen=True, slots=True)
class RelaySource:
    """A relay: its bytes, and the name of its process."""

    source: ByteSource
    process: str


@dataclass(slots=True)
class FollowedSources:
    """The upstreams, and the relays of the one that answers.

    Attributes:
        upstreams: in the order in which they are tried.
        hands_on: whether others may pull from this follower, also while it pulls itself.
        wrong: why relays are not used any more, by process: they gave wrong bytes.
        lost: the processes of relays that did not give what they were asked for in this pull.
        told: is notified when the upstream is to hear of something.
    """

    upstreams: Sequence[Upstream]
    hands_on: bool = False
    wrong: dict[str, str] = field(default_factory=dict[str, str])
    lost: set[str] = field(default_factory=set[str])
    told: Notifier = field(default_factory=Notifier)
    _current: int = 0
    _named: Mapping[str, tuple[Relay | None, ...]] = field(default_factory=dict[str, "tuple[Relay | None, ...]"])
    _known: dict[str, ByteSource | None] = field(default_factory=dict[str, "ByteSource | None"])

    @property
    def upstream(self) -> Upstream:
        """The upstream that is followed now."""
        return self.upstreams[self._current]

    def next(self) -> None:
        """Go on to the next upstream, which has not named any relays yet."""
        if len(self.upstreams) > 1:
            self._current = (self._current + 1) % len(self.upstreams)
            self._named = {}

    def answered(self, answer: ReportAnswer) -> None:
        """Take the relays that the upstream names now."""
        self._named = answer.relays

    def checks_blocks(self, version: str) -> bool:
        """Whether each block of a version is checked as it comes, since relays give it or it is handed on."""
        return self.hands_on or bool(self._named.get(version))

    def stripes(self, version: str) -> int:
        """In how many stripes a version is pulled, each from a source of its own."""
        return max(1, len(self._named.get(version, ())))

    def relay(self, version: str, block: int) -> RelaySource | None:
        """The relay to pull a block of a version from, counted through all of its files; None for the upstream."""
        named = self._named.get(version, ())
        at = named[block % len(named)] if named else None
        if at is None or at.process in self.wrong or at.process in self.lost:
            return None
        if at.url not in self._known:
            self._known[at.url] = self.upstream.relay(at.url)
        source = self._known[at.url]
        return None if source is None else RelaySource(source, at.process)

    def distrust(self, relay: RelaySource, why: str) -> None:
        """Use a relay no more: it gave wrong bytes."""
        self.wrong[relay.process] = why
        log.warning("a relay is not used any more", relay=relay.source.name, reason=why)
        self.told.notify()

    def failed(self, relay: RelaySource, why: str) -> None:
        """A relay did not give a block: it is not asked again in this pull."""
        self.lost.add(relay.process)
        log.info("a relay did not give a part", relay=relay.source.name, reason=why)
        self.told.notify()

    def pull_ended(self) -> None:
        """The next pull begins without complaints."""
        self.lost.clear()

    async def aclose(self) -> None:
        """Give back connections."""
        for source in (*self.upstreams, *(relay for relay in self._known.values() if relay is not None)):
            await source.aclose()
