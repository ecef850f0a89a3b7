"""`refitd status`: everything at one glance."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from refitd.cli import render
from refitd.cli.output import ExitCode, Output, calls_service
from refitd.cli.render import by_need, counted, worst_standing
from refitd.cli.versions import version_list
from refitd.clock import SystemClock
from refitd_client.contract.states import Standing, VersionState
from refitd_client.contract.wire import Engine, Faults, GroupLead, RunGlance, Version, left_out_clause
from refitd_client.http.client import RefitClient
from refitd_client.transport.ways import way_of

ENGINES = 24
_STATUS_PAGE = 500
Limit = Annotated[
    int, typer.Option("--limit", metavar="N", min=1, max=100, help="How many of the newest versions to list")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run: the version that its engines should serve, how many engines follow it, how many serve that version.

    `paused_since` is when an operator paused its updates, None while they go on. `standing`, `headline` and `reasons`
    are the verdict that `refitd top` and the dashboard give as well.
    """

    run: str
    target: Version | None
    engines: int
    in_sync: int
    paused_since: str | None
    standing: Standing
    headline: str
    reasons: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusSummary:
    """The answer of `refitd status`. `versions` are those that came last and are not deleted, of runs that are not
    closed first.

    `standing` is the most urgent one of all runs, TROUBLED where something is wrong with the service itself;
    None before anything is known of a run. `leader` is the service of a group that leads it, None of one alone.
    `follows` says whom the service follows.
    """

    url: str
    ready: bool
    standing: Standing | None
    faults: Faults
    runs: list[RunSummary]
    engines: list[Engine]
    versions: list[Version]
    leader: GroupLead | None = None
    follows: str | None = None


@calls_service
def status(out: Output, client: RefitClient, limit: Limit = 5) -> None:
    """Show at one glance: the service, each run's target, engines and how stale they are, the newest versions.

    Each run begins with the verdict that 'refitd top' and the dashboard give: CURRENT, MOVING, PAUSED, ROLLED_BACK (by
    an operator's order), UNFOLLOWED (no engine follows it) or TROUBLED; --json has it as .runs[].standing, and that of
    the worst as .standing. Runs that are closed are counted in one line; --json has them like the others.

    Ends with 0 when the service is ready and with 3 when it is not, so that a script can ask.

    \b
    refitd status
    refitd status --json | jq '.runs[] | {run, in_sync, engines}'
    """
    summary = look(client, limit)
    targets = {run.run: run.target.id for run in summary.runs if run.target is not None}
    told = [reason for run in summary.runs for reason in run.reasons]
    closed = [run.run for run in summary.runs if run.standing is Standing.CLOSED]
    out.show(
        summary,
        _headline(summary),
        *_leader(summary.leader),
        *([] if summary.follows is None else [render.sentence(summary.follows, "dim")]),
        *(render.sentence(fault, "bold red") for fault in summary.faults.sentences),
        *(line for run in summary.runs if run.run not in closed for line in _run_lines(run, out.console.width)),
        *(render.sentence(line, "dim") for line in render.closed_runs(closed)),
        "",
        *_engines(summary.engines, targets),
        "",
        *version_list(summary.versions, out.window, told),
    )
    if not summary.ready:
        raise typer.Exit(ExitCode.UNREACHABLE)


def _engines(engines: Sequence[Engine], targets: Mapping[str, str | None]) -> list[RenderableType]:
    """A glance is no list of a thousand: those that need an operator, and how many others there are."""
    if not engines:
        return [render.sentence("No engines.", "dim")]
    first = by_need(engines)
    table, rest = render.engines_table(first[:ENGINES], targets, SystemClock().now()), first[ENGINES:]
    more = f"and {len(rest):,} more ({counted(rest)}): 'refitd engines' lists them"
    return [table, render.sentence(more, "dim")] if rest else [table]


def _headline(summary: StatusSummary) -> Text:
    """The service and its runs' standing in one line: a service that is ready may have engines that are not."""
    word = Text("ready", style="green") if summary.ready else Text("not ready (see its log)", style="bold red")
    line = Text.assemble(("refitd ", "bold"), render.sentence(summary.url), " is ", word)
    return line if summary.standing is None else line.append(", ").append_text(render.shown_standing(summary.standing))


def _leader(leader: GroupLead | None) -> list[Text]:
    if leader is None:
        return []
    return [render.sentence(f"{leader.address} leads the group since {leader.since}, epoch {leader.epoch}.", "dim")]


def _run_lines(run: RunSummary, width: int) -> list[Text]:
    """A run in one line, and below it the reasons of its standing, in lines of `width` columns."""
    first = Text.assemble(render.shown_standing(run.standing), " ", _run_line(run))
    return [first, *(line for reason in run.reasons for line in render.told(reason, width, "    "))]


def _run_line(run: RunSummary) -> Text:
    name = render.sentence(run.run, "bold")
    if run.target is None:
        return Text.assemble(name, ": ", render.sentence(run.headline.rstrip(".")))
    style = "green" if run.engines and run.in_sync == run.engines else "yellow"
    count = (f"{run.in_sync} of {run.engines} engines" if run.engines else "no engine", style)
    lost = ", whose files are lost: publish a newer step" if run.target.state is VersionState.LOST else ""
    alone = ", in memory alone" if run.target.in_memory else ""
    transport = run.target.metadata.get("transport")
    by = render.sentence("" if transport is None else f", {way_of(transport, run.target.kind)}")
    paused = "" if run.paused_since is None else f", paused since {run.paused_since}: refitd resume {run.run}"
    clause = left_out_clause(run.target.left_out, run.target.left_out_count)
    partly = render.sentence(f", which {clause}" if clause else "", "yellow")
    told = (render.sentence(paused, "yellow"), lost, alone, partly)
    aim = f" → step {run.target.step:,} ({run.target.id})"
    return Text.assemble(name, aim, by, ", served by ", count, *told)


def look(client: RefitClient, limit: int) -> StatusSummary:
    """Ask the service for everything that the summary needs."""
    overview = client.overview()
    targets, runs, faults = targets_of(client, overview.runs), overview.runs, overview.faults
    closed = {run.run for run in runs if run.standing is Standing.CLOSED}
    return StatusSummary(
        url=client.url,
        ready=client.ready(),
        standing=Standing.TROUBLED if faults.sentences else worst_standing(run.standing for run in runs),
        faults=faults,
        runs=[_summary(run, targets.get(run.run)) for run in sorted(runs, key=lambda run: run.run)],
        engines=overview.engines,
        versions=sorted(_came_last(client), key=lambda version: version.run in closed)[:limit],
        leader=overview.leader,
        follows=overview.follows,
    )


def targets_of(client: RefitClient, runs: Iterable[RunGlance]) -> dict[str, Version]:
    """The version that the engines of each run should serve, for the runs that have a good one."""
    return {run.run: client.version(run.target) for run in runs if run.target is not None}


def _summary(run: RunGlance, target: Version | None) -> RunSummary:
    return RunSummary(
        run=run.run,
        target=target,
        engines=sum(run.engines.values()),
        in_sync=run.in_sync,
        paused_since=run.paused_since,
        standing=run.standing,
        headline=run.headline,
        reasons=run.reasons,
    )


def _came_last(client: RefitClient) -> list[Version]:
    """The versions that are not deleted, the last seen first; those of one second, as after a start, by step.

    The service lists them by generation and step, with what an older generation still publishes below all others.
    """
    states = [state for state in VersionState if state is not VersionState.DELETED]
    found = [version for state in states for version in client.versions(state=state, limit=_STATUS_PAGE).items]
    seconds = len("2026-11-27T16:27:33")
    return sorted(found, key=lambda each: (each.created_at[:seconds], each.generation, each.step), reverse=True)
