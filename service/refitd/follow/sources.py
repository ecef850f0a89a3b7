"""Whom the puller pulls from: the upstream that answers, of several, and the relays that it has named."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from refitd.follow.upstream import ByteSource, Upstream

log = structlog.get_logger("refitd")


@dataclass(slots=True)
class FollowedSources:
    """Whom the puller pulls from now: the upstream that answers, and the relays that it has named."""

    upstreams: Sequence[Upstream]
    current: int = 0
    wrong: dict[str, str] = field(default_factory=dict[str, str])
    named: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    _relays: dict[str, ByteSource | None] = field(default_factory=dict[str, "ByteSource | None"])

    @property
    def upstream(self) -> Upstream:
        """See `Sources`."""
        return self.upstreams[self.current]

    def next(self) -> None:
        """Go on to the next upstream."""
        self.current = (self.current + 1) % len(self.upstreams)

    def relays(self, version: str) -> Sequence[ByteSource]:
        """See `Sources`."""
        found: list[ByteSource] = []
        for url in self.named.get(version, ()):
            if url not in self._relays:
                self._relays[url] = self.upstream.relay(url)
            relay = self._relays[url]
            if relay is not None and relay.name not in self.wrong:
                found.append(relay)
        return found

    def distrust(self, relay: str, why: str) -> None:
        """See `Sources`."""
        self.wrong[relay] = why
        log.warning("a relay is not used any more", relay=relay, reason=why)

    def failed(self, version: str, relay: str) -> None:
        """See `Sources`."""
        self.named = {**self.named, version: tuple(url for url in self.named.get(version, ()) if url != relay)}

    async def aclose(self) -> None:
        """Give back connections."""
        for source in (*self.upstreams, *(relay for relay in self._relays.values() if relay is not None)):
            await source.aclose()
