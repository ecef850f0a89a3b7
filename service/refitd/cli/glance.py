"""What `refitd top` shows: the dashboard's facts, for a terminal of any size. Pure: wire types in, Rich out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap

from rich.console import Group, RenderableType
from rich.text import Text

from refitd.cli import render, standing
from refitd.cli.table import Table
from refitd_client.contract.states import EngineState, Standing
from refitd_client.contract.wire import Engine, Event, Overview, RunGlance, Version

BAR = 32  # characters, where there is room
_LEAST_BAR = 8
# Lines around each part: an empty one, the table's head, and what stands below it.
_ENGINES_FRAME, _UPDATES_FRAME, _EVENTS_FRAME = 4, 5, 1
_SMALL = 10  # lines that engines have for themselves
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
_OTHER = ("?", "dim")
_NUMBERS = frozenset({"STEP", "TOOK", "ENGINES", "SIZE"})
_NEED = (
    EngineState.CONTESTED,
    EngineState.QUARANTINED,
    EngineState.TAINTED,
    EngineState.NACKED,
    EngineState.UNREACHABLE,
    EngineState.PROBING,
    EngineState.UPDATING,
    EngineState.VERIFYING,
    EngineState.BEHIND,
    EngineState.IN_SYNC,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """What was seen at one look. `lost` says why nothing newer is known, None where this is how it is now."""

    url: str
    overview: Overview
    versions: Sequence[Version]
    events: Sequence[Event]
    lost: str | None = None


def screen(glance: Glance, height: int | None = None, width: int | None = None) -> RenderableType:
    """Everything, for `width` columns; within `height` lines where that is given, the most important first."""
    top = [_headline(glance, is_live=height is not None), *_faults(glance.overview, width)]
    closed = [run.run for run in glance.overview.runs if run.standing is Standing.CLOSED]
    for run in glance.overview.runs:
        top += [] if run.standing is Standing.CLOSED else _run(run, width)
    top += [render.sentence(line, "dim") for line in standing.folded(closed)]
    room = None if height is None else height - len(top) - _ENGINES_FRAME
    engines, versions, events = _shares(room, len(glance.overview.engines), len(glance.versions), len(glance.events))
    parts: list[RenderableType] = [*top, "", _engines(glance.overview.engines, engines, glance.overview.at)]
    if versions:
        parts += ["", _updates(glance.versions[:versions], width)]
    if events:
        parts += ["", *(_event(event) for event in glance.events[:events])]
    return Group(*parts)


def _shares(room: int | None, engines: int, versions: int, events: int) -> tuple[int, int, int]:
    """How many lines each part gets, besides its frame. What one does not need the next one may have."""
    if room is None:
        return engines, versions, events
    wished = versions + _UPDATES_FRAME + events + _EVENTS_FRAME
    first = min(engines, max(room // 2, room - wished, 1) if room > _SMALL else max(room, 1))
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
    return _line(("refitd ", "bold"), render.sentence(glance.url), "  ", word, leave)


def _line(*parts: str | Text | tuple[str, str]) -> Text:
    """What is cut at the edge of the window and never goes on in a second line."""
    return Text.assemble(*parts, overflow="ellipsis", no_wrap=True)


def _told(text: str, width: int | None, begin: str, style: str = "") -> list[Text]:
    """A sentence to its end, in as many lines as it needs: what to do stands at its end."""
    told = render.sentence(text).plain
    rest = " " * len(begin)
    lines = [begin + told] if width is None else wrap(told, width, initial_indent=begin, subsequent_indent=rest)
    return [_line((line, style)) for line in lines]


def _faults(overview: Overview, width: int | None) -> list[Text]:
    return [line for fault in overview.faults.told for line in _told(fault, width, "▲ ", "bold red")]


def _run(run: RunGlance, width: int | None) -> list[Text]:
    first = _line(standing.shown(run.standing), " ", render.sentence(f"{run.run}:"), " ", (run.headline, "bold"))
    return [first, *(line for reason in run.reasons for line in _told(reason, width, "    "))]


def _engines(engines: Sequence[Engine], most: int, now: str) -> RenderableType:
    if not engines:
        return render.sentence("No engines.", "dim")
    ordered = sorted(engines, key=lambda engine: (_NEED.index(engine.state), engine.id))
    several = len({engine.run for engine in engines}) > 1
    columns = ("ENGINE", "STATE", "STEP", "BEHIND", "LOAD", *(("RUN",) if several else ()))
    table = Table(*columns, right={"STEP", "BEHIND", "LOAD"}, words="WHY", cut=True)
    for engine in ordered[:most]:
        load = engine.last_attempt
        table.add_row(
            render.sentence(engine.id),
            render.engine_state(engine),
            render.step(engine, "{:,}"),
            render.NOTHING if engine.behind is None else str(engine.behind),
            render.NOTHING if load is None or load.outcome is None else span(sum(load.timings.values())),
            *((render.sentence(engine.run or render.NOTHING),) if several else ()),
            words=render.sentence(render.why_there(engine, now) or ""),
        )
    rest = len(engines) - most
    return table if rest <= 0 else Group(table, render.sentence(f"and {rest} more", "dim"))


def _updates(versions: Sequence[Version], width: int | None) -> RenderableType:
    table = _bars(versions, BAR)
    if width is not None and table.width > width:  # bars give way to numbers
        table = _bars(versions, max(BAR - (table.width - width), _LEAST_BAR))
    told = [f"{letter} {name}" for name, (letter, _) in STAGES.items()]
    serving, standing_still = ([each for each in told if each[0].isupper() is still] for still in (False, True))
    still = f"in capitals the engine stands still: {', '.join(standing_still)}"
    return Group(table, _line((", ".join(serving), "dim")), _line((still, "dim")))


def _bars(versions: Sequence[Version], width: int) -> Table:
    longest = max((sum(version.timings.values()) for version in versions), default=0.0)
    several = len({version.run for version in versions}) > 1
    columns = ("STEP", "STATE", "UPDATE", "TOOK", "ENGINES", "SIZE", *(("RUN",) if several else ()))
    table = Table(*columns, right=_NUMBERS, cut=True)
    for version in versions:
        took = sum(version.timings.values())
        table.add_row(
            f"{version.step:,}",
            render.version_state(version),
            bar(version.timings, longest, width),
            span(took) if took else render.NOTHING,
            render.engines_on(version),
            render.size(version.bytes),
            *((render.sentence(version.run),) if several else ()),  # last, where a long name takes no room from others
        )
    return table


def bar(timings: Mapping[str, float], longest: float, width: int = BAR) -> Text:
    """Stages to scale, one after the other: `longest` milliseconds fill `width` characters. None is left out."""
    text, passed, drawn = Text(), 0.0, 0
    for name in (*STAGES, *sorted(timings.keys() - STAGES.keys())):
        if timings.get(name, 0.0) > 0:
            passed += timings[name]
            count = max(round(passed / longest * width) - drawn, 1)
            letter, style = STAGES.get(name, _OTHER)
            text.append(letter * count, style=style)
            drawn += count
    return text


def span(milliseconds: float) -> str:
    """A duration with about three digits, as the dashboard writes it."""
    if milliseconds < 9.95:
        return f"{milliseconds:.2g} ms"
    if milliseconds < 999.5:
        return f"{milliseconds:.0f} ms"
    seconds = milliseconds / 1000
    return f"{seconds:.3g} s" if seconds < 99.5 else f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


def _event(event: Event) -> Text:
    at = event.at.partition("T")[2].partition(".")[0]
    return _line((f"{at} ", "dim"), render.sentence(event.subject, "cyan"), " ", render.sentence(event.text))
