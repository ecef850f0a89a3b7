"""The hosts that follow this service, as its API has them: what they report, and who speaks for them."""

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from typing import Protocol

from refitd.api.auth import Credentials, FollowClaim
from refitd.api.context import Hosts
from refitd.clock import Clock
from refitd.engine.address import check_engine_id
from refitd.problem import ProblemError, Slug
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd_client.contract.follow import Following
from refitd_client.contract.naming import InvalidNameError, parse_version_id, version_id
from refitd_hosts.hub.followers import FilesSent, Followers
from refitd_hosts.hub.reported import GONE_SECONDS, ReportedHosts
from refitd_hosts.policy.hosts import newest_on_hosts, not_known, stands_of, why_hosts_stay

_REPORT_PATH = re.compile(r"/v1/hosts/([^/]{1,200})")


class HostNames:
    """For which hosts a token that only follows may speak.

    A line `name:token` of the file names the hosts, also by a pattern such as `gpu-*`. A token without a name speaks
    for the host that used it first, until that has been silent for so long that it is no engine any more. In memory
    alone.
    """

    def __init__(self, clock: Clock) -> None:
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


class Follows(Protocol):
    """What follows the upstreams of this service, the one that is asked now first."""

    urls: Sequence[str]

    @property
    def is_led(self) -> bool:
        """Whether a hub says when engines here go to a version."""
        ...

    def following(self) -> Following:
        """What this service says of itself to its upstream."""
        ...


class Hub(Hosts):
    def __init__(self, store: Store, led: ReportedHosts | None) -> None:
        """Have heard of no host yet. `led` takes hosts as engines; None where this service leads none.

        `follower` is what follows the upstreams of this service, None where it follows none.
        """
        self.store, self.led = store, led
        self.followers, self.names, self.sent = Followers(store.clock), HostNames(store.clock), FilesSent()
        self.follower: Follows | None = None
        if led is not None:
            led.is_shared = self.followers.is_shared

    @property
    def told(self) -> list[Following]:
        """What each host says of itself."""
        return [known.report.told for known in self.followers.known.values()]

    def in_use(self) -> Iterator[tuple[str, str]]:
        """Which version (its id) is pulled, by whom."""
        return chain(self.followers.pulled(), self.sent.in_use())

    def of_run(self, run: str) -> list[str]:
        return sorted(told.follower for told in self.told if told.run in {None, run})

    def newest_unknown(self, run: str) -> str | None:
        store, reports = self.store, (known.report for known in self.followers.known.values())
        return newest_on_hosts(run, reports, lambda version: version in store.versions or version in store.gone)

    def why_they_stay(self, announced: VersionRecord) -> str | None:
        return why_hosts_stay(announced.id, self.newest_unknown(announced.run))

    def leaves(self, goal: VersionRecord) -> dict[str, tuple[str, int]]:
        leader = ("", 0) if self.led is None else self.led.leader
        found: dict[str, tuple[str, int]] = {}
        for told in self.told:
            known = parse_version_id(self.store.newest_known(goal.run, told.follower, stands_of(told)) or "")
            newest = goal.order if known is None else max(known[1], goal.order)
            if (had := not_known(goal.run, told, version_id(goal.run, newest), leader)) is not None:
                found[told.follower] = had
        return found

    def note_refused(self, claim: Credentials, problem: ProblemError) -> None:
        """Of a report it is said: the host that sends it hears it alone."""
        match = _REPORT_PATH.fullmatch(claim.path)
        if claim.method == "PUT" and match is not None:
            self.say_refused(match[1], problem.kind, problem.detail)

    def say_refused(self, name: str, kind: Slug, why: str) -> None:
        """Put the refusal of a report into the log, unless it was said lately. Anybody may have sent it."""
        try:
            check_engine_id(name)
        except InvalidNameError:
            return
        if self.led is not None and self.led.refuse(name, kind.slug, why):
            self.store.say("follower", name, f"a report in its name was refused: {why}", is_fault=True)
