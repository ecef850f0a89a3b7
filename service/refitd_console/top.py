"""`refitd top`: the dashboard in a terminal of any size."""

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Annotated, Any, Self

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from refitd.cli import render
from refitd.cli.options import calls_service
from refitd.cli.output import Output
from refitd.cli.render import Table, by_need, counted
from refitd_client.contract.states import Standing
from refitd_client.contract.wire import Event, Overview, RunGlance, Version
from refitd_client.errors import ServiceError, UnauthorizedError
from refitd_client.http.client import RefitClient

BAR = 32  # characters, where there is room
_LEAST_BAR = 8
# Lines around each part: an empty one, the table's head, and what stands below it.
_ENGINES_FRAME, _UPDATES_FRAME, _EVENTS_FRAME = 4, 5, 1
_SMALL_SCREEN = 10  # lines that engines have for themselves
# A letter for each stage, so that a bar can be read without colours. In the capitals the engine stands still.
STAGES: Mapping[str, tuple[str, str]] = {
    "publish": ("p", "dim"),
    "seen": ("s", "dim"),
    "validate": ("v", "blue"),
    "copy": ("c", "bright_cyan"),
    "prepare": ("e", "cyan"),
    "pause": ("P", "yellow"),
    "load": ("L", "bright_blue"),
    "verify": ("V", "magenta"),
    "resume": ("R", "green"),
}
# Of an update that pauses nothing: an adapter's, or that of hosts, which pause their engines themselves for a while.
_UNPAUSED: Mapping[str, str] = {"load": "l", "verify": "y", "resume": "r"}
_OTHER = ("?", "dim")
_NUMBER_COLUMNS = frozenset({"STEP", "TOOK", "ENGINES", "SIZE"})
Once = Annotated[bool, typer.Option("--once", help="Look once and end, as when stdout is no terminal")]
Interval = Annotated[float, typer.Option("--interval", metavar="SECONDS", min=0.1, help="Time between two looks")]
VERSIONS = 20
EVENTS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """What was seen at one look. `lost` says why nothing newer could be read; None where this is the last state."""

    url: str
    overview: Overview
    versions: Sequence[Version]
    events: Sequence[Event]
    lost: str | None = None


@calls_service
def top(out: Output, client: RefitClient, once: Once = False, interval: Interval = 1.0) -> None:
    """Watch runs, engines, updates and decisions, live. The key q ends it.

    The first lines answer whether the engines are on the newest version, and if not, why not. Colours only repeat what
    words and letters say (NO_COLOR turns them off).

    \b
    refitd top
    refitd top --once
    refitd top --json | jq -r '.runs[].headline'
    """
    if out.json:
        out.show(client.overview())
    elif once or not sys.stdout.isatty():
        out.show(None, screen(look(client), width=out.console.width))
    else:
        _watch(client, out, interval)


def look(client: RefitClient) -> Glance:
    """Ask the service for everything that is shown."""
    return Glance(
        url=client.url,
        overview=client.overview(),
        versions=client.versions(limit=VERSIONS).items,
        events=client.log(limit=EVENTS).items,
    )


def _watch(client: RefitClient, out: Output, interval: float) -> None:
    glance = look(client)  # a service that cannot be reached at all is an error
    with (
        Live(screen=True, auto_refresh=False, console=out.console) as live,
        KeyReader() as keys,
        suppress(KeyboardInterrupt),
    ):
        while True:
            live.update(screen(glance, out.console.height, out.console.width), refresh=True)
            if keys.pressed("q", within=interval):
                return
            try:
                glance = look(client)
            except UnauthorizedError:
                raise
            except ServiceError as error:
                glance = replace(glance, lost=str(error))


class KeyReader:
    """Reads keys without waiting for Enter, for the length of the block. Ctrl-C interrupts as usual."""

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._before: list[Any] = []

    def __enter__(self) -> Self:
        if self._fd is not None:
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def pressed(self, key: str, *, within: float) -> bool:
        """Wait for a key, at most `within` seconds; whether it was pressed. Other keys are read and forgotten."""
        ends = time.monotonic() + within
        while (left := ends - time.monotonic()) > 0:
            if self._fd is None:
                time.sleep(left)
            elif select.select([self._fd], [], [], left)[0]:
                read = os.read(self._fd, 1024)
                if not read:  # the terminal is gone
                    self._fd = None
                elif key in read.decode(errors="replace"):
                    return True
        return False


def screen(glance: Glance, height: int | None = None, width: int | None = None) -> RenderableType:
    """Lay out everything, the most important first."""
    top = [_headline(glance, is_live=height is not None)]
    for fault in glance.overview.faults.sentences:
        top += render.told(fault, width, "▲ ", "bold red")
    closed = [run.run for run in glance.overview.runs if run.standing is Standing.CLOSED]
    for run in glance.overview.runs:
        top += [] if run.standing is Standing.CLOSED else _run(run, width)
    top += [render.sentence(line, "dim") for line in render.closed_runs(closed)]
    room = None if height is None else height - len(top) - _ENGINES_FRAME
    engines, versions, events = _shares(room, len(glance.overview.engines), len(glance.versions), len(glance.events))
    parts: list[RenderableType] = [*top, "", _engines(glance.overview, engines)]
    if versions:
        parts += ["", _updates(glance.versions[:versions], glance.overview, width)]
    if events:
        parts += ["", *(_event(event) for event in glance.events[:events])]
    return Group(*parts)


def _shares(room: int | None, engines: int, versions: int, events: int) -> tuple[int, int, int]:
    """How many lines each part gets, besides its frame. What one does not need the next one may have."""
    if room is None:
        return engines, versions, events
    wished = versions + _UPDATES_FRAME + events + _EVENTS_FRAME
    first = min(engines, max(room // 2, room - wished, 1) if room > _SMALL_SCREEN else max(room, 1))
    left = room - first - _UPDATES_FRAME
    second = min(versions, max(left // 2, left - events - _EVENTS_FRAME, 0))
    left = left - second if second else room - first
    return first, second, min(events, max(left - _EVENTS_FRAME, 0))


def _headline(glance: Glance, *, is_live: bool) -> Text:
    at = glance.overview.at.partition("T")[2].partition(".")[0]
    if glance.lost is None:
        word = Text(f"● live, {at} UTC", style="green")
    else:
        word = render.sentence(f"✕ not live since {at} UTC: {glance.lost}; trying again", "bold red")
    leave = ("  q ends this", "dim") if is_live else ""
    return render.line(("refitd ", "bold"), render.sentence(glance.url), "  ", word, leave)


def _run(run: RunGlance, width: int | None) -> list[Text]:
    first = render.line(
        render.shown_standing(run.standing), " ", render.sentence(f"{run.run}:"), " ", (run.headline, "bold")
    )
    return [first, *(line for reason in run.reasons for line in render.told(reason, width, "    "))]


def _engines(overview: Overview, most: int) -> RenderableType:
    if not overview.engines:
        return render.sentence("No engines.", "dim")
    engines = by_need(overview.engines)
    columns = render.listed_columns(engines) - {"URL", "PROOF"} | {"TOOK"}
    if len({engine.run for engine in engines}) == 1:
        columns.remove("RUN")
    targets = {run.run: run.target for run in overview.runs}
    table = render.engines_table(engines[:most], targets, overview.at, columns, cut=True)
    rest = len(engines) - most
    return table if rest <= 0 else Group(table, render.sentence(f"and {rest} more: {counted(engines[most:])}", "dim"))


def _updates(versions: Sequence[Version], overview: Overview, width: int | None) -> RenderableType:
    table = _bars(versions, overview, BAR)
    if width is not None and table.width > width:  # bars give way to numbers
        table = _bars(versions, overview, max(BAR - (table.width - width), _LEAST_BAR))
    told = [f"{letter} {name}" for name, (letter, _) in STAGES.items()]
    serving, standing_still = ([each for each in told if each[0].isupper() is still] for still in (False, True))
    unpaused = [version.timings for version in versions if "pause" not in version.timings]
    serving += [f"{letter} {name}" for name, letter in _UNPAUSED.items() if any(name in each for each in unpaused)]
    still = f"in capitals the engine stands still: {', '.join(standing_still)}"
    return Group(table, render.line((", ".join(serving), "dim")), render.line((still, "dim")))


def _bars(versions: Sequence[Version], overview: Overview, width: int) -> Table:
    longest = max((sum(version.timings.values()) for version in versions), default=0.0)
    several = len({version.run for version in versions}) > 1
    columns = ("STEP", "STATE", "UPDATE", "TOOK", "ENGINES", "SIZE", *(("RUN",) if several else ()))
    table = Table(*columns, right=_NUMBER_COLUMNS, cut=True)
    for version in versions:
        table.add_row(
            f"{version.step:,}",
            render.version_state(version),
            bar(version.timings, longest, width),
            took(version, overview),
            render.engines_on(version),
            render.size(version.bytes),
            *((render.sentence(version.run),) if several else ()),  # last, where a long name takes no room from others
        )
    return table


def took(version: Version, overview: Overview) -> str:
    """How long an update took. Of one under way, how long that has been: a stage's time is known only at its end."""
    run = next((run for run in overview.runs if run.run == version.run), None)
    if _is_under_way(version, run):
        ran = datetime.fromisoformat(overview.at) - datetime.fromisoformat(version.created_at)
        return f"{render.span(max(0.0, ran / timedelta(milliseconds=1)))} so far"
    milliseconds = sum(version.timings.values())
    return render.span(milliseconds) if milliseconds else render.NOTHING


def _is_under_way(version: Version, run: RunGlance | None) -> bool:
    """Whether a version is examined, or brought to engines for the first time: what a rollback goes to was served."""
    if version.state.awaits_verdict and not version.in_memory:
        return True
    if run is None or run.target != version.id or run.update is None or run.paused_since is not None:
        return False
    return run.update.is_under_way and "load" not in version.timings and len(version.engines) > 0


def bar(timings: Mapping[str, float], longest: float, width: int = BAR) -> Text:
    """Draw stages to scale, one after the other, each with one character at least. No engine stands still in an update
    that has no stage `pause`.

    Args:
        timings: milliseconds of each stage.
        longest: milliseconds that fill the width.
        width: of the bar, in characters.
    """
    text, passed, drawn = Text(), 0.0, 0
    small: Mapping[str, str] = {} if "pause" in timings else _UNPAUSED
    for name in (*STAGES, *sorted(timings.keys() - STAGES.keys())):
        if timings.get(name, 0.0) > 0:
            passed += timings[name]
            count = max(round(passed / longest * width) - drawn, 1)
            letter, style = STAGES.get(name, _OTHER)
            text.append(small.get(name, letter) * count, style=style)
            drawn += count
    return text


def _event(event: Event) -> Text:
    return render.line(render.event_line(event, event.at.partition("T")[2].removesuffix("Z")))
