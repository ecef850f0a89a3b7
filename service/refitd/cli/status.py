"""What `refitd status` shows: everything at one glance. Imports no Typer: `refitd.__main__` calls it without."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from refitd.cli import render
from refitd.cli.output import ExitCode, Output
from refitd.cli.render import by_need, counted, version_list
from refitd_client.contract.states import Standing, VersionState
from refitd_client.contract.wire import Engine, Overview, RunGlance, Version, left_out_clause
from refitd_client.http.client import RefitClient
from refitd_client.ways import way_of

ENGINES = 24
VERSIONS, MOST_VERSIONS = 5, 100
_STATUS_PAGE = 500


def show_status(out: Output, client: RefitClient, limit: int) -> None:
    """Ask the service, and print the answer.

    Raises:
        SystemExit: the service is not ready.
    """
    document, lines = look(out, client, limit)
    out.show(document, *lines)
    if not document["ready"]:
        raise SystemExit(ExitCode.UNREACHABLE)


def look(out: Output, client: RefitClient, limit: int = VERSIONS) -> tuple[dict[str, Any], list[RenderableType]]:
    """Ask the service; return the answer as a document and as lines."""
    overview, ready = client.overview(), client.ready()
    targets = {run.run: client.version(run.target) for run in overview.runs if run.target is not None}
    closed = [run.run for run in overview.runs if run.standing is Standing.CLOSED]
    versions = sorted(_came_last(client), key=lambda version: version.run in closed)[:limit]
    return _document(client.url, overview, versions, ready=ready), [
        *_head(client.url, overview, ready=ready),
        *(line for run in overview.runs if run.run not in closed for line in _run(run, targets.get(run.run), out)),
        *(render.sentence(line, "dim") for line in render.closed_runs(closed)),
        "",
        *_engines(overview),
        "",
        *version_list(versions, out.window, [reason for run in overview.runs for reason in run.reasons]),
    ]


def _standing(overview: Overview) -> Standing | None:
    """The most urgent one of all runs, TROUBLED where something is wrong with the service itself; None without runs."""
    if overview.faults.sentences:
        return Standing.TROUBLED
    return render.worst_standing(run.standing for run in overview.runs)


def _document(url: str, overview: Overview, versions: Sequence[Version], *, ready: bool) -> dict[str, Any]:
    return {
        "url": url,
        "ready": ready,
        "standing": _standing(overview),
        "faults": overview.faults,
        "runs": overview.runs,
        "engines": overview.engines,
        "versions": versions,
        "leader": overview.leader,
        "follows": overview.follows,
    }


def _head(url: str, overview: Overview, *, ready: bool) -> list[Text]:
    """The service and its runs' standing in one line: a service that is ready may have engines that are not."""
    word = Text("ready", style="green") if ready else Text("not ready (see its log)", style="bold red")
    line = Text.assemble(("refitd ", "bold"), render.sentence(url), " is ", word)
    if (standing := _standing(overview)) is not None:
        line.append(", ").append_text(render.shown_standing(standing))
    lines, leader = [line], overview.leader
    if leader is not None:
        told = f"{leader.address} leads the group since {leader.since}, epoch {leader.epoch}."
        lines.append(render.sentence(told, "dim"))
    if overview.follows is not None:
        lines.append(render.sentence(overview.follows, "dim"))
    return [*lines, *(render.sentence(fault, "bold red") for fault in overview.faults.sentences)]


def _engines(overview: Overview) -> list[RenderableType]:
    """A glance is no list of a thousand: those that need an operator, and how many others there are."""
    if not overview.engines:
        return [render.sentence("No engines.", "dim")]
    targets: Mapping[str, str | None] = {run.run: run.target for run in overview.runs}
    first = by_need(overview.engines)
    table, rest = render.engines_table(first[:ENGINES], targets, overview.at), first[ENGINES:]
    return [table, render.sentence(_more(rest), "dim")] if rest else [table]


def _more(rest: Sequence[Engine]) -> str:
    return f"and {len(rest):,} more ({counted(rest)}): 'refitd engines' lists them"


def _run(run: RunGlance, target: Version | None, out: Output) -> list[Text]:
    """A run in one line, and below it the reasons of its standing."""
    first = Text.assemble(render.shown_standing(run.standing), " ", _run_line(run, target))
    return [first, *(line for reason in run.reasons for line in render.told(reason, out.console.width, "    "))]


def _run_line(run: RunGlance, target: Version | None) -> Text:
    name = render.sentence(run.run, "bold")
    if target is None:
        return Text.assemble(name, ": ", render.sentence(run.headline.rstrip(".")))
    engines = sum(run.engines.values())
    style = "green" if engines and run.in_sync == engines else "yellow"
    count = (f"{run.in_sync} of {engines} engines" if engines else "no engine", style)
    lost = ", whose files are lost: publish a newer step" if target.state is VersionState.LOST else ""
    alone = ", in memory alone" if target.in_memory else ""
    transport = target.metadata.get("transport")
    by = render.sentence("" if transport is None else f", {way_of(transport, target.kind)}")
    paused = "" if run.paused_since is None else f", paused since {run.paused_since}: refitd resume {run.run}"
    clause = left_out_clause(target.left_out, target.left_out_count)
    partly = render.sentence(f", which {clause}" if clause else "", "yellow")
    aim = f" → step {target.step:,} ({target.id})"
    return Text.assemble(name, aim, by, ", served by ", count, render.sentence(paused, "yellow"), lost, alone, partly)


def _came_last(client: RefitClient) -> list[Version]:
    """The versions that are not deleted, the last seen first; those of one second, as after a start, by step.

    The service lists them by generation and step, with what an older generation still publishes below all others.
    """
    states = [state for state in VersionState if state is not VersionState.DELETED]
    found = [version for state in states for version in client.versions(state=state, limit=_STATUS_PAGE).items]
    seconds = len("2026-11-27T16:27:33")
    return sorted(found, key=lambda each: (each.created_at[:seconds], each.generation, each.step), reverse=True)
