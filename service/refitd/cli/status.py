"""`refitd status`: everything at one glance."""

from typing import Annotated

import typer
from rich.text import Text

from refitd.cli import render, standing
from refitd.cli.exits import ExitCode
from refitd.cli.options import Json, TokenFile, Url, connect
from refitd.cli.output import speaking
from refitd.cli.summary import RunSummary, Summary, look
from refitd.clock import SystemClock
from refitd_client.contract.states import Standing, VersionState

Limit = Annotated[
    int, typer.Option("--limit", metavar="N", min=1, max=100, help="How many of the newest versions to list")
]


def status(limit: Limit = 5, url: Url = None, token_file: TokenFile = None, json: Json = False) -> None:
    """Show at one glance: the service, each run's target, engines and how stale they are, the newest versions.

    Each run begins with the verdict that 'refitd top' and the dashboard give: CURRENT, MOVING, PAUSED, ROLLED_BACK (as
    somebody has ordered), UNFOLLOWED (no engine follows it) or TROUBLED; --json has it as .runs[].standing, and that of
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
            *(render.sentence(fault, "bold red") for fault in summary.faults.told),
            *(line for run in summary.runs if run.run not in closed for line in run_lines(run)),
            *(render.sentence(line, "dim") for line in standing.folded(closed)),
            "",
            render.engines_table(summary.engines, targets, SystemClock().now())
            if summary.engines
            else render.sentence("No engines.", "dim"),
            "",
            render.versions_table(summary.versions) if summary.versions else render.sentence("No versions.", "dim"),
        )
        if not summary.ready:
            raise typer.Exit(ExitCode.UNREACHABLE)


def headline(summary: Summary) -> Text:
    """The service in one line, and how its runs stand: a service that is ready may have engines that are not."""
    word = Text("ready", style="green") if summary.ready else Text("not ready (see its log)", style="bold red")
    line = Text.assemble(("refitd ", "bold"), render.sentence(summary.url), " is ", word)
    return line if summary.standing is None else line.append(", ").append_text(standing.shown(summary.standing))


def run_lines(run: RunSummary) -> list[Text]:
    """A run in one line, and below it why it is not as it should be."""
    verdict = [] if run.standing is None else [standing.shown(run.standing), " "]
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
