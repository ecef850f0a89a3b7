"""`refitd status`: everything at one glance."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import typer
from rich.text import Text

from refitd.cli import render
from refitd.cli.exits import ExitCode
from refitd.cli.options import Json, TokenFile, Url, connect
from refitd.cli.output import speaking
from refitd.cli.render import worst_standing
from refitd.clock import SystemClock
from refitd_client.contract.states import EngineState, Standing, VersionState
from refitd_client.contract.wire import Engine, Faults, RunGlance, Version
from refitd_client.http.client import RefitClient

# Among so many of a run's newest good versions, one is not barred: a rollback seldom goes further.
_LOOK_BACK = 20
_PAGE = 500
Limit = Annotated[
    int, typer.Option("--limit", metavar="N", min=1, max=100, help="How many of the newest versions to list")
]


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
class StatusSummary:
    """The answer of `refitd status`. `versions` are those that came last and are not deleted.

    `standing` is the most urgent one of all runs, TROUBLED where something is wrong with the service itself;
    None before anything is known of a run.
    """

    url: str
    ready: bool
    standing: Standing | None
    faults: Faults
    runs: list[RunSummary]
    engines: list[Engine]
    versions: list[Version]


def status(limit: Limit = 5, url: Url = None, token_file: TokenFile = None, json: Json = False) -> None:
    """Show at one glance: the service, each run's target, engines and how stale they are, the newest versions.

    Each run begins with the verdict that 'refitd top' and the dashboard give: CURRENT, MOVING, PAUSED, ROLLED_BACK (by
    an operator's order), UNFOLLOWED (no engine follows it) or TROUBLED; --json has it as .runs[].standing, and that of
    the worst as .standing. Runs that are closed are counted in one line; --json has them like the others.

    Ends with 0 when the service is ready and with 3 when it is not, so that a script can ask.

    \b
    refitd status
    refitd status --json | jq '.runs[] | {run, in_sync, engines}'
    """
    with speaking(json=json) as out, connect(url, token_file) as client:
        summary = look(client, limit)
        targets = {run.run: run.target for run in summary.runs if run.target is not None}
        closed = [run.run for run in summary.runs if run.standing is Standing.CLOSED]
        out.show(
            summary,
            headline(summary),
            *(render.sentence(fault, "bold red") for fault in summary.faults.sentences),
            *(line for run in summary.runs if run.run not in closed for line in run_lines(run)),
            *(render.sentence(line, "dim") for line in render.closed_runs(closed)),
            "",
            render.engines_table(summary.engines, targets, SystemClock().now())
            if summary.engines
            else render.sentence("No engines.", "dim"),
            "",
            render.versions_table(summary.versions) if summary.versions else render.sentence("No versions.", "dim"),
        )
        if not summary.ready:
            raise typer.Exit(ExitCode.UNREACHABLE)


def headline(summary: StatusSummary) -> Text:
    """The service and its runs' standing in one line: a service that is ready may have engines that are not."""
    word = Text("ready", style="green") if summary.ready else Text("not ready (see its log)", style="bold red")
    line = Text.assemble(("refitd ", "bold"), render.sentence(summary.url), " is ", word)
    return line if summary.standing is None else line.append(", ").append_text(render.shown_standing(summary.standing))


def run_lines(run: RunSummary) -> list[Text]:
    """A run in one line, and below it the reasons of its standing."""
    verdict = [] if run.standing is None else [render.shown_standing(run.standing), " "]
    return [Text.assemble(*verdict, _run_line(run)), *(render.sentence(f"    {reason}") for reason in run.reasons)]


def _run_line(run: RunSummary) -> Text:
    name = render.sentence(run.run, "bold")
    if run.target is None:
        return Text.assemble(name, " has no good version yet", "" if run.engines else ", and no engine follows it")
    style = "green" if run.engines and run.in_sync == run.engines else "yellow"
    count = (f"{run.in_sync} of {run.engines} engines" if run.engines else "no engine", style)
    lost = ", whose files are lost: publish a newer step" if run.target.state is VersionState.LOST else ""
    alone = ", in memory alone as yet" if run.target.in_memory else ""
    paused = "" if run.paused_since is None else f", paused since {run.paused_since}: refitd resume {run.run}"
    told = (render.sentence(paused, "yellow"), lost, alone)
    return Text.assemble(name, f" → step {run.target.step} ({run.target.id}), served by ", count, *told)


def look(client: RefitClient, limit: int) -> StatusSummary:
    """Ask the service for everything that the summary needs."""
    versions = came_last(client)
    engines = client.engines().items
    names = {version.run for version in versions} | {engine.run for engine in engines if engine.run}
    targets = look_at_targets(client, names, engines)
    overview = client.overview()
    glances, faults = {run.run: run for run in overview.runs}, client.faults()
    return StatusSummary(
        url=client.url,
        ready=client.ready(),
        standing=Standing.TROUBLED if faults.sentences else worst_standing(run.standing for run in overview.runs),
        faults=faults,
        runs=[summarise(run, targets.get(run), engines, glances.get(run)) for run in sorted(names)],
        engines=engines,
        versions=versions[:limit],
    )


def came_last(client: RefitClient) -> list[Version]:
    """The versions that are not deleted, the last seen first.

    The service lists them by generation and step, with what an older generation still publishes below all others.
    """
    states = [state for state in VersionState if state is not VersionState.DELETED]
    found = [version for state in states for version in client.versions(state=state, limit=_PAGE).items]
    return sorted(found, key=lambda version: (version.created_at, version.generation, version.step), reverse=True)


def look_at_targets(client: RefitClient, runs: Iterable[str], engines: Sequence[Engine]) -> dict[str, Version]:
    """Find the version that the engines of each run should serve, for the runs that have a good one.

    Args:
        client: of the service.
        runs: the runs.
        engines: all engines; what they serve counts also where its files are lost.
    """
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
    """Sum up one run.

    Args:
        run: its name.
        target: the version that its engines should serve.
        engines: all engines.
        seen: what the service says of the run.
    """
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
