"""Commands that look at versions or change one thing: status, versions, pin, unpin, pause, resume, explain."""

from typing import Annotated

import typer

from refitd.cli import render
from refitd.cli.options import RunArgument, calls_service
from refitd.cli.output import Output
from refitd.cli.render import version_list
from refitd.cli.status import MOST_VERSIONS, VERSIONS, show_status
from refitd_client.contract.states import EngineState, Standing, VersionGlance, VersionState
from refitd_client.errors import RefitError
from refitd_client.http.client import RefitClient

Limit = Annotated[int, typer.Option("--limit", metavar="N", min=1, max=500, help="How many to list")]
Run = Annotated[str | None, typer.Option("--run", metavar="RUN", help="Those of one run only")]
State = Annotated[
    str | None,
    typer.Option(
        "--state", metavar="STATE", help="Those that are arriving, good, rejected or gone, or in one finer state"
    ),
]
Cursor = Annotated[
    str | None, typer.Option("--cursor", metavar="WORD", help="Go on where a page ended: its next_cursor")
]
OfRun = Annotated[str | None, typer.Argument(metavar="RUN", help="The same as --run")]
VersionId = Annotated[
    str, typer.Argument(metavar="ID", help="A version's id, such as exp~v000123, or its step if only one run has it")
]
Subject = Annotated[str, typer.Argument(metavar="ID", help="A run, or the id of a version or an engine")]


@calls_service
def status(
    out: Output,
    client: RefitClient,
    limit: Annotated[
        int,
        typer.Option("--limit", metavar="N", min=1, max=MOST_VERSIONS, help="How many of the newest versions to list"),
    ] = VERSIONS,
) -> None:
    """Show at one glance: the service, each run's target, engines and how stale they are, the newest versions.

    Each run begins with the verdict that 'refitd top' and the dashboard give: CURRENT, MOVING, PAUSED, ROLLED_BACK (by
    an operator's order), UNFOLLOWED (no engine follows it) or TROUBLED; --json has it as .runs[].standing, and that of
    the worst as .standing. Runs that are closed are counted in one line; --json has them like the others.

    Ends with 0 when the service is ready and with 3 when it is not, so that a script can ask.

    \b
    refitd status
    refitd status --json | jq '.runs[] | {run, in_sync, headline}'
    """
    show_status(out, client, limit)


@calls_service
def versions(
    out: Output,
    client: RefitClient,
    of_run: OfRun = None,
    run: Run = None,
    state: State = None,
    limit: Limit = 20,
    cursor: Cursor = None,
) -> None:
    """List versions, newest first: within one run by generation and step, across runs by when they were first seen.

    \b
    refitd versions exp/trial
    refitd versions --state rejected --limit 5
    refitd versions --json | jq -r '.items[].id'
    """
    if None not in (run, of_run) and run != of_run:
        raise ValueError(f"of which run, {of_run} or {run}? Name one")
    run = run or of_run
    page = client.versions(run, None if state is None else _state(state), limit, cursor)
    if not page.items and run is not None and run not in {seen.run for seen in client.overview().runs}:
        raise RefitError(f"no run {run} is known: 'refitd runs' lists what there is")
    out.show(page, *version_list(page.items, out.window))
    if page.next_cursor is not None and not out.json:
        out.remark(f"there are more: --limit N, or --cursor {page.next_cursor}", style="dim")


def _state(word: str) -> VersionState:
    meant = [state for state in VersionState if word.lower() in {state.lower(), state.glance}]
    if not meant:
        raise ValueError(f"--state {word!r} is none of {', '.join([*VersionGlance, *VersionState])}")
    if len(meant) > 1:
        raise ValueError(f"{word} is {', '.join(meant)}: name one of these")
    return meant[0]


@calls_service
def pin(out: Output, client: RefitClient, version_id: VersionId) -> None:
    """Keep a version, whatever the keep rules say, until it is unpinned.

    A host that follows refuses it while the hub has the version: say it to the hub.
    """
    version = client.pin(version_id)
    out.show(version, render.sentence(f"{version.id} is pinned: it is kept until you unpin it."))


@calls_service
def unpin(out: Output, client: RefitClient, version_id: VersionId) -> None:
    """Leave a version to the keep rules again. A host that follows refuses it as it refuses a pin."""
    version = client.unpin(version_id)
    kept = f"it is {version.state}, and nothing is left to keep" if version.state.is_over else "the keep rules decide"
    out.show(version, render.sentence(f"{version.id} is no longer pinned: {kept}."))


@calls_service
def pause(out: Output, client: RefitClient, run: RunArgument) -> None:
    """Bring no engine of a run to a newer version until `refitd resume`.

    Loads that are under way come to their end. An engine that is restarted or breaks is brought to the last good
    version, and a rollback is carried out. Said to a host that follows, it holds for the engines of that host.

    \b
    refitd pause exp/trial
    """
    seen = client.pause(run)
    out.show(seen, render.sentence(f"Updates of {run} are paused: 'refitd resume {run}' lets them go on."))


@calls_service
def resume(out: Output, client: RefitClient, run: RunArgument) -> None:
    """Let the updates of a run go on after `refitd pause`.

    \b
    refitd resume exp/trial
    """
    seen = client.resume(run)
    away = seen.engines.get(EngineState.UNREACHABLE, 0)
    later = "" if away == 0 else f" {away} of its engines cannot be reached, and will follow when back."
    is_held = seen.standing is Standing.PAUSED  # by an operator of something else: its upstream, or its hosts
    elsewhere = "".join(f" {reason}." for reason in seen.reasons) if is_held else ""
    out.show(seen, render.sentence(f"Updates of {run} go on here. {seen.headline}{later}{elsewhere}"))


@calls_service
def explain(out: Output, client: RefitClient, subject: Subject) -> None:
    """Say why a run, a version or an engine is where it is, and what it waits for.

    For a run, it shows the status and then the target. SUBJECT may also be a step or a folder's name, if only one run
    has it, or an engine's URL.

    \b
    refitd explain exp~v000123
    refitd explain engine-0
    refitd explain exp
    refitd explain 123
    """
    explained = client.explain(subject)
    out.show(explained, render.explanation(explained))
