"""The upstreams of a follower: which of them is followed now."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from refitd.state.observer import Notifier
from refitd_hosts.follow.upstream import Upstream


@dataclass(slots=True)
class FollowedSources:
    """The upstreams.

    Attributes:
        upstreams: in the order in which they are tried.
        told: is notified when the upstream is to hear of something.
    """

    upstreams: Sequence[Upstream]
    told: Notifier = field(default_factory=Notifier)
    _current: int = 0

    @property
    def upstream(self) -> Upstream:
        """The upstream that is followed now."""
        return self.upstreams[self._current]

    def next(self) -> None:
        """Go on to the next upstream."""
        self._current = (self._current + 1) % len(self.upstreams)

    async def aclose(self) -> None:
        """Give back connections."""
        for upstream in self.upstreams:
            await upstream.aclose()
