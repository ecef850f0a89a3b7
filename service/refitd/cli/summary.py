"""The state of everything at one glance: what `status` gathers, and what it makes of it."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from refitd.cli.standing import worst
from refitd_client.contract.states import EngineState, Standing, VersionState
from refitd_client.contract.wire import Engine, Faults, RunGlance, Version
from refitd_client.http.client import RefitClient

# Among so many of a run's newest good versions, one is not barred: a rollback seldom goes further.
_LOOK_BACK = 20
_PAGE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run: the version that its engines should serve, how many engines follow it, how many serve that version.

    `paused_since` is when an operator paused its rollouts, None while they go on. `standing`, `headline` and `reasons`
    are the verdict that `refitd top` and the dashboard give as well; None where the service says nothing of the run.
    """

    run: str
    target: Version | None
    engines: int
    in_sync: int
    paused_since: str | None = None
    standing: Standing | None = None
    headline: str | None = None
    reasons: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The answer of `refitd status`. `versions` are those that came last and are not deleted.

    `standing` is that of the run that needs somebody most, TROUBLED where something is wrong with the service itself;
    None before anything is known of a run.
    """

    url: str
    ready: bool
    standing: Standing | None
    faults: Faults
    runs: list[RunSummary]
    engines: list[Engine]
    versions: list[Version]


def look(client: RefitClient, limit: int) -> Summary:
    """Ask the service for everything that the summary needs."""
    versions = came_last(client)
    engines = client.engines().items
    names = {version.run for version in versions} | {engine.run for engine in engines if engine.run}
    targets = look_at_targets(client, names, engines)
    overview = client.overview()
    glances, faults = {run.run: run for run in overview.runs}, client.faults()
    return Summary(
        url=client.url,
        ready=client.ready(),
        standing=Standing.TROUBLED if faults.told else worst(run.standing for run in overview.runs),
        faults=faults,
        runs=[summarise(run, targets.get(run), engines, glances.get(run)) for run in sorted(names)],
        engines=engines,
        versions=versions[:limit],
    )


def came_last(client: RefitClient) -> list[Version]:
    """The versions that are not deleted, what the service saw last first.

    It lists them by generation and step; there, what an older generation still publishes would stand below all others.
    """
    states = [state for state in VersionState if state is not VersionState.DELETED]
    found = [version for state in states for version in client.versions(state=state, limit=_PAGE).items]
    return sorted(found, key=lambda version: (version.created_at, version.generation, version.step), reverse=True)


def look_at_targets(client: RefitClient, runs: Iterable[str], engines: Sequence[Engine]) -> dict[str, Version]:
    """What the engines of each run should serve, for the runs that have a good version."""
    held = {engine.version for engine in engines if engine.version is not None}
    in_memory = {engine.version for engine in engines if engine.version is not None and engine.in_memory}
    taken = [client.version(version) for version in sorted(in_memory)]
    found: dict[str, Version] = {}
    for run in runs:
        sealed = client.versions(run=run, state=VersionState.SEALED, limit=_LOOK_BACK).items
        lost = client.versions(run=run, state=VersionState.LOST, limit=_LOOK_BACK).items
        mine = [version for version in taken if version.run == run]
        if (target := newest_good([*sealed, *lost, *mine], held)) is not None:
            found[run] = target
    return found


def newest_good(versions: Iterable[Version], held: Collection[str]) -> Version | None:
    """The newest version that was not rolled back from. One without good files is it while engines serve it."""
    there = (version for version in versions if version.state is VersionState.SEALED or version.id in held)
    good = (version for version in there if not version.barred)
    return max(good, key=lambda version: (version.generation, version.step), default=None)


def summarise(run: str, target: Version | None, engines: Iterable[Engine], seen: RunGlance | None = None) -> RunSummary:
    """One run."""
    mine = [engine for engine in engines if engine.run == run]
    there = [
        engine for engine in mine if target and engine.version == target.id and engine.state is EngineState.IN_SYNC
    ]
    counted = RunSummary(run=run, target=target, engines=len(mine), in_sync=len(there))
    if seen is None:
        return counted
    return replace(
        counted,
        paused_since=seen.paused_since,
        standing=seen.standing,
        headline=seen.headline,
        reasons=seen.reasons,
    )
