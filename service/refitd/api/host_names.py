"""For which hosts a token that only follows may speak.

A line `name:token` of the file names the hosts, also by a pattern such as `gpu-*`. A token without a name speaks for
the host that used it first, until that has been silent for so long that it is no engine any more.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from refitd.clock import Clock
from refitd.update.hosts import GONE_SECONDS


@dataclass(frozen=True, slots=True)
class FollowClaim:
    """A token that came with a report: its digest, and the names that its line has; None where that has none."""

    digest: bytes
    names: str | None


class HostNames:
    """Which host has used which token first. In memory alone."""

    def __init__(self, clock: Clock) -> None:
        """None was used yet."""
        self._clock = clock
        self._used: dict[bytes, tuple[str, float]] = {}

    def refusal(self, claim: FollowClaim, name: str) -> str | None:
        """Why a token may not speak for a host, in a sentence; None where it may."""
        if claim.names is not None:
            may = fnmatchcase(name, claim.names)
            return None if may else f"the token speaks for {claim.names}, and not for {name[:200]}"
        now = self._clock.monotonic()
        owner, at = self._used.get(claim.digest, (name, now))
        if owner != name and now - at <= GONE_SECONDS:
            return (
                f"the token speaks for {owner}, which used it first, and not for {name[:200]}: give each host a token "
                "of its own, or write name:token into the hub's --followers-token-file"
            )
        self._used[claim.digest] = name, now
        return None
