"""Commands about versions: list, pin, unpin, pause, resume, explain."""

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import RenderableType

from refitd.cli import render
from refitd.cli.output import Output, RunArgument, calls_service
from refitd.cli.render import INDENT, Table
from refitd.text import one_line
from refitd_client.contract.states import EngineState, Kind, Standing, VersionGlance, VersionState
from refitd_client.contract.wire import Version
from refitd_client.errors import RefitError
from refitd_client.http.client import RefitClient

_CUT = "…"
_WHERE_THE_REST_IS = f"Where a reason ends in '{_CUT}', 'refitd explain VERSION' has all of it."


def version_list(versions: Sequence[Version], window: int | None, told: Sequence[str] = ()) -> list[RenderableType]:
    """Versions, one a row, each with the reason why it is where it is in one line at most.

    Args:
        versions: in the order in which they stand.
        window: columns that there are, to which reasons are cut; None for as many as it takes, as into a pipe.
        told: sentences that stand above the list: a reason with which one ends is not said again.
    """
    if not versions:
        return [render.sentence("No versions.", "dim")]
    words = [_in_short(version, window, told) for version in versions]
    table = _table(versions, words, with_kind=True)
    if window is not None and table.width > window and all(version.kind is Kind.FULL for version in versions):
        table = _table(versions, words, with_kind=False)
    is_cut = any(reason is not None and reason.endswith(_CUT) for reason in words)
    return [table, render.sentence(_WHERE_THE_REST_IS, "dim")] if is_cut else [table]


def _table(versions: Sequence[Version], words: Sequence[str | None], *, with_kind: bool) -> Table:
    kind = ("KIND",) if with_kind else ()
    table = Table("VERSION", "STEP", *kind, "STATE", "SIZE", "ENGINES", "SEEN", right={"STEP", "SIZE"}, words="WHY")
    for version, reason in zip(versions, words, strict=True):
        table.add_row(
            render.cell(version.id),
            f"{version.step:,}",
            *((version.kind.value,) if with_kind else ()),
            render.version_state(version),
            render.size(version.bytes),
            render.engines_on(version),
            render.when(version.created_at),
            words=render.cell(reason),
        )
    return table


def _in_short(version: Version, window: int | None, told: Sequence[str]) -> str | None:
    """Why a version is where it is: all of it, or what fits into a line that stands beneath its row."""
    reason = render.why(version)
    if reason is None:
        return None
    if any(sentence.endswith(reason) for sentence in told):
        return f"'refitd explain {version.id}'"
    line = one_line(reason)
    if window is None or len(line) <= (room := max(window - INDENT, 1)):
        return reason if window is None else line
    end = line.rfind("; ", 0, room + 1)  # as a rule between two of several faults: as many as the window has room for
    return line[: room - 1 if end < 0 else end].rstrip() + _CUT


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
