"""What a host that follows knows of its upstream now, for people and for what is said of its run."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamWord:
    """What the upstream has said last, and since when it says nothing.

    `name` is what sentences call it: its URL. `run` is the run that is followed, None where that is not known yet.
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
