"""The wire types of what has been: past updates, and one engine's past.

Times of day are RFC 3339 strings in UTC, durations are milliseconds. Each type is what one GET answers or lists.
"""

from dataclasses import dataclass, field

from refitd_client.contract.states import EngineState, Kind, VersionState


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The median, the 95th percentile (nearest rank) and the largest of `count` durations."""

    count: int
    p50: float
    p95: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PastUpdate:
    """One version and how engines came to it.

    `created_at` is when the service first saw it, `served_at` when it was first proved on every reachable engine of its
    run. `kind` is HANDOVER for a version that engines took from its trainer's memory. `density` is the share of
    elements that changed since the version before, `why_full` why it is no delta, where its publisher said so.

    `loads` counts all loads of it; `done` those that engines took, by what was loaded; `failed` those that failed, by
    outcome. An engine that declines a hand-over loads the files later: that is no failure.
    `timings` are the stages of its publication and of the slowest load. `pause` is for how long engines stood still in
    the loads that they took, from the call that pauses to the end of the one that resumes, without loads that pause
    nothing and without hosts, which pause their engines themselves; `served` is the time from the start of publishing
    until an engine was done, without engines that came only after `served_at`. Both are None where nothing was
    measured.
    """

    id: str
    run: str
    generation: int
    step: int
    kind: Kind
    state: VersionState
    created_at: str
    served_at: str | None = None
    reason: str | None = None
    bytes: int | None = None
    density: float | None = None
    why_full: str | None = None
    timings: dict[str, float] = field(default_factory=dict[str, float])
    loads: int = 0
    done: dict[str, int] = field(default_factory=dict[str, int])
    failed: dict[str, int] = field(default_factory=dict[str, int])
    pause: Spread | None = None
    served: Spread | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Past updates, the newest first, at most 1,000.

    `complete` is False while the service still reads the loads of some of them: those have no `pause` and `served` yet.
    Ask again for them.
    """

    at: str
    updates: list[PastUpdate]
    complete: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PastLoad:
    """One load of an engine. `ms` is None while it runs. `pause` is the part of it in which the engine stood still.
    It is None while it runs, where the load pauses nothing, and of a host, which pauses its engines itself.

    `outcome` is as in `Attempt`. `kind` is what was loaded, None where an earlier release recorded the load.
    """

    version: str
    step: int | None
    at: str
    ms: float | None = None
    pause: float | None = None
    outcome: str | None = None
    kind: Kind | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """A time for which an engine could not be updated, was left alone, or had unknown contents.

    `until` is None while it lasts.
    """

    state: EngineState
    since: str
    until: str | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePast:
    """One engine's newest loads and outages, the oldest first. `more`: it has older ones."""

    engine: str
    loads: list[PastLoad]
    outages: list[Outage]
    more: bool = False
