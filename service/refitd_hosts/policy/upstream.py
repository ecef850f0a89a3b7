"""What a host that follows has to say of its upstream, and what is decided there alone. Pure.

The upstream decides where engines go, which versions are barred and pinned, and when the run ends: what an operator did
about that on this host would be undone at the next look. What he does to this host's own updates and engines stays.
"""

from dataclasses import dataclass

from refitd.policy.goals import is_here
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import parse_version_id
from refitd_client.contract.stores import is_bucket_url


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamWord:
    """What the upstream has said last, and since when it says nothing: a `refitd.state.faults.FollowedUpstream`.

    `name` is what sentences call it: its URL. `host` is what it calls this host.
    `run` is the run that is followed, None where that is not known yet.
    `silent_since` is when it was heard last (RFC 3339), "" where that was not since the start, None while it is heard.
    `is_paused`: updates of the run are paused there. `leads`: it says what is served here.
    `wanted` is the id of the version that this host is to serve, `elsewhere` of the one that hosts
    are to serve which no hub leads, `pulling` of the one that is pulled now. `source`, `ahead` and `store_fault` are as
    in `Following`. `has_ended`: it has said that the run has
    ended, or that it has none of that name. `listed` are the ids of the versions of the run that it has named last,
    None where it was not heard yet. `disobeyed` is why engines here do not go where it wants, or that it does not know
    what they serve, in a sentence; None where neither is so. `reported` is when it took this host's last report
    (monotonic seconds), None where it took none since the start.
    """

    name: str
    host: str = ""
    run: str | None = None
    silent_since: str | None = None
    is_paused: bool = False
    leads: bool = False
    wanted: str | None = None
    elsewhere: str | None = None
    pulling: str | None = None
    source: str = ""
    ahead: int | None = None
    store_fault: str | None = None
    has_ended: bool = False
    listed: frozenset[str] | None = None
    disobeyed: str | None = None
    reported: float | None = None

    @property
    def whom_it_follows(self) -> str:
        return f"This host follows {self.name}" + ("." if is_bucket_url(self.name) else f" as {self.host}.")

    @property
    def trouble(self) -> str | None:
        if self.silent_since is not None:
            since = f"since {self.silent_since}" if self.silent_since else "since this service started"
            return f"Nothing was heard from {self.name} {since}: whether it has anything newer is not known here"
        return None if self.disobeyed is None else self.disobeyed[0].upper() + self.disobeyed[1:]

    def waits_for(
        self, target: VersionRecord | None, newest: VersionRecord | None, *, is_paused: bool = False
    ) -> str | None:
        if self.silent_since is not None:  # what it said last may be over
            return None
        if self.is_paused:
            return f"{self.name} has paused the run: this host goes to nothing newer before it is resumed there"
        if is_here(newest, target) and newest is not None and (newest.id != self.wanted or is_paused):
            why = self._why_paused(newest) if is_paused else self._why_not_yet()
            return f"Step {newest.order.step:,} is here and good: {why}"
        pulled = parse_version_id(self.pulling or "")
        if pulled is not None and self.ahead is not None:
            return f"Step {pulled[1].step:,} waits to be pulled from {self.name}: {hosts_before(self.ahead)}"
        return None if pulled is None else f"Step {pulled[1].step:,} is pulled from {self.source or self.name}"

    def pulls_newer(self, newest: VersionRecord | None) -> bool:
        pulled = parse_version_id(self.pulling or "")
        return pulled is not None and newest is not None and pulled[1] > newest.order

    def not_brought(self, run: str) -> str:
        return (
            f"This service follows {self.name}, which decides where engines go: none is brought to {run} here. Publish "
            f"it there; 'refitd runs close {run}' says here that it has ended"
        )

    def last_report(self, now: float) -> list[str]:
        """As `FollowedUpstream`; nothing where it is an object store."""
        if is_bucket_url(self.name):
            return []
        if self.reported is None:
            return [f"{self.name} has taken no report of this host since this service started."]
        return [f"{self.name} took the last report of this host {now - self.reported:,.0f} s ago."]

    def about_pulls(self) -> list[str]:
        return without_store(self.store_fault)

    def _why_paused(self, newest: VersionRecord) -> str:
        """A hub that leads this host orders nothing newer while that is paused."""
        if newest.id != self.wanted and not self.leads:
            return self._why_not_yet()
        ordered = "" if newest.id == self.wanted else f", and {self.name} orders it then"
        return f"engines load it when updates are resumed here (refitd resume {newest.run}){ordered}"

    def _why_not_yet(self) -> str:
        if self.leads:
            return f"engines load it when {self.name} orders it, which may bring other hosts there first"
        return f"{self.name} wants {self.elsewhere or 'no version'} to be served"


def hosts_before(ahead: int) -> str:
    if not ahead:
        return "it asks for its turn"
    return "1 host pulls before this one" if ahead == 1 else f"{ahead} hosts pull before this one"


def without_store(store_fault: str | None) -> list[str]:
    """Say why the object store is not asked that an upstream has named; nothing where it is."""
    return [] if store_fault is None else [f"It pulls from its upstream, and not from the object store: {store_fault}."]


def decided_by(upstream: str, do: str) -> str:
    """Say that an upstream decides something, and to do it there. In an object store nothing can be done."""
    where = "at the service that pushes into it (refitd serve --push)" if is_bucket_url(upstream) else "there"
    return f"this service follows {upstream}: {do} {where}"


def decides_run(word: UpstreamWord | None, run: str) -> bool:
    """Whether the upstream decides where engines of a run go. Before the first look it may."""
    return word is None or word.run == run


def decides_end(word: UpstreamWord | None, run: str) -> bool:
    """Whether the upstream decides when a run ends: it has not ended there."""
    return decides_run(word, run) and not (word is not None and word.has_ended)


def decides_pin(word: UpstreamWord | None, version: VersionRecord) -> bool:
    """Whether the upstream decides whether a version is pinned. A version that it has no more is this host's own."""
    listed = None if word is None else word.listed
    return decides_run(word, version.run) and (listed is None or version.id in listed)
