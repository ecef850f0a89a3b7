"""How runs, versions and engines look to people. Pure: wire types in, Rich renderables out.

A run's standing is the verdict that `refitd status`, `refitd top` and the dashboard all give.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from textwrap import wrap
from typing import assert_never

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from refitd.engine.fingerprints import CONTRADICTED, NOT_ALIKE, NOT_COMPARED
from refitd.text import clean, listed, one_line, size_of, spoken
from refitd_client.contract.naming import parse_version_id
from refitd_client.contract.plugin import setting_fault
from refitd_client.contract.states import (
    EngineGlance,
    EngineState,
    Kind,
    LogSeverity,
    Standing,
    VersionGlance,
    VersionState,
    WaitOutcome,
)
from refitd_client.contract.wire import Engine, Event, Explanation, Version, WaitResult

GAP = "  "
INDENT = 4  # columns, of words beneath their row


@dataclass(frozen=True, slots=True)
class _Row:
    cells: tuple[Text, ...]
    words: Text | None


class Table:
    """Rows under titles. Columns in `right` are aligned to the right; `words` titles the last, free column, if any.

    Columns are as wide as what is in them, and words go beneath their row where they do not fit beside it. Rich's own
    tables share the terminal's width among all columns: at 80 of them an id is broken in two, numbers lose digits, and
    a reason becomes a column of twelve characters and thirteen lines. A row that is wider goes on below.
    """

    def __init__(self, *titles: str, right: Collection[str] = (), words: str | None = None) -> None:
        self._right = tuple(title in right for title in titles)
        self._rows = [_Row(tuple(Text(title) for title in titles), None if words is None else Text(words))]

    def add_row(self, *cells: str | Text, words: str | Text | None = None) -> None:
        told = None if words is None else _text(words)
        self._rows.append(_Row(tuple(_text(cell) for cell in cells), told))

    @property
    def width(self) -> int:
        """Of all columns, in characters, without words."""
        widths = self._widths()
        return sum(widths) + len(GAP) * (len(widths) - 1)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        widths, (head, *rows) = self._widths(), self._rows
        has_room = head.words is not None and self._fits(head.words, options.max_width)
        title = self._line(head, widths, head.words if has_room else None)  # no stub of a title at the window's edge
        title.stylize("bold")
        title.truncate(options.max_width)
        yield title
        yield Text("─" * title.cell_len)
        for row in rows:
            if row.words is None or self._fits(row.words, options.max_width):
                yield self._line(row, widths, row.words)
            else:
                yield self._line(row, widths, None)
                for line in row.words.wrap(console, max(options.max_width - INDENT, 1)):
                    line.rstrip()
                    yield Text(" " * INDENT).append_text(line)

    def _widths(self) -> list[int]:
        return [
            max(cell.cell_len for cell in column) for column in zip(*(row.cells for row in self._rows), strict=True)
        ]

    def _fits(self, words: Text, width: int) -> bool:
        return "\n" not in words.plain and self.width + len(GAP) + words.cell_len <= width

    def _line(self, row: _Row, widths: Iterable[int], words: Text | None) -> Text:
        cells = [cell.copy() for cell in row.cells]
        for cell, width, is_right in zip(cells, widths, self._right, strict=True):
            cell.align("right" if is_right else "left", width)
        line = Text(GAP).join(cells if words is None else [*cells, words])
        line.rstrip()
        line.overflow = "fold"
        return line


def _text(cell: str | Text) -> Text:
    return Text(cell) if isinstance(cell, str) else cell


# A shape for each, so that colours are not needed; the most urgent first.
_LOOKS: Mapping[Standing, tuple[str, str]] = {
    Standing.TROUBLED: ("▲", "bold red"),
    Standing.UNFOLLOWED: ("○", "bold red"),
    Standing.PAUSED: ("‖", "yellow"),
    Standing.MOVING: ("▶", "yellow"),
    Standing.ROLLED_BACK: ("◀", "cyan"),
    Standing.CURRENT: ("●", "green"),
    Standing.CLOSED: ("□", "dim"),
}


def shown_standing(standing: Standing) -> Text:
    shape, style = _LOOKS[standing]
    return Text(f"{shape} {standing}", style=style)


def worst_standing(standings: Iterable[Standing]) -> Standing | None:
    return min(standings, key=list(_LOOKS).index, default=None)


def closed_runs(closed: Sequence[str]) -> list[str]:
    """The runs that are closed, in one line; none where there is none."""
    if not closed:
        return []
    count = "1 run is" if len(closed) == 1 else f"{len(closed)} runs are"
    return [f"{count} closed: {listed(closed)} ('refitd runs')"]


NOTHING = "-"

GOOD = "green"
BUSY = "yellow"
BAD = "bold red"
OVER = "dim"

_VERSION_STYLES: Mapping[VersionGlance, str] = {
    VersionGlance.ARRIVING: BUSY,
    VersionGlance.GOOD: GOOD,
    VersionGlance.REJECTED: BAD,
    VersionGlance.GONE: OVER,
}
_CUT = "…"
_WHERE_THE_REST_IS = f"Where a reason ends in '{_CUT}', 'refitd explain VERSION' has all of it."
_ENGINE_STYLES: Mapping[EngineGlance, str] = {
    EngineGlance.IN_SYNC: GOOD,
    EngineGlance.UPDATING: BUSY,
    EngineGlance.AWAY: BAD,
    EngineGlance.TROUBLED: BAD,
}


def when(instant: str) -> str:
    """Month, day and time of an instant in UTC, which are enough for people. JSON has the whole."""
    return clean(instant)[5:19].replace("T", " ") + "Z"


def when_exactly(instant: str) -> str:
    """As `when`, with milliseconds: many entries of the log are of one second."""
    return clean(instant)[5:23].replace("T", " ").removesuffix("Z") + "Z"


def event_line(event: Event, at: str) -> Text:
    style = "yellow" if event.severity is LogSeverity.WARNING else ""
    return Text.assemble((f"{at} ", "dim"), sentence(event.subject, "cyan"), " ", sentence(event.text, style))


def why(version: Version) -> str | None:
    """Why it is where it is. What a rollback barred has no reason of its own, or one from before."""
    if not _is_barred(version):
        return version.reason
    if version.state is VersionState.SEALED or version.reason is None:
        return f"barred: {version.reason or 'rolled back from'}"
    return f"{version.reason}; barred: rolled back from"


def _is_barred(version: Version) -> bool:
    """Whether to show that a rollback barred it. A rejected version gets no engines in any case: it is shown only where
    engines took it from memory.
    """
    return version.barred and (version.state is not VersionState.REJECTED or version.in_memory)


def version_state(version: Version) -> Text:
    """The state at a glance, with what a person did to the version, and whether it has no files."""
    style = BAD if version.state.is_bad else _VERSION_STYLES[version.state.glance]
    text = Text(version.state.glance, style=OVER if version.barred and style == GOOD else style)
    words = (("pinned", version.pinned), ("barred", _is_barred(version)), ("in memory", version.in_memory))
    for word in [word for word, said in words if said]:
        text.append(f" {word}", style="cyan")
    return text


def engines_on(version: Version) -> str:
    """How many engines of the run serve the version, of how many. One that does not answer does not."""
    if not version.engines:
        return NOTHING
    return f"{sum(engine.serves for engine in version.engines)}/{len(version.engines)}"


def version_list(versions: Sequence[Version], window: int | None, told: Sequence[str] = ()) -> list[RenderableType]:
    """Versions, one a row, each with the reason why it is where it is in one line at most.

    Args:
        versions: in the order in which they stand.
        window: columns that there are, to which reasons are cut; None for as many as it takes, as into a pipe.
        told: sentences that stand above the list: a reason with which one ends is not said again.
    """
    if not versions:
        return [sentence("No versions.", "dim")]
    words = [_in_short(version, window, told) for version in versions]
    table = _versions_table(versions, words, with_kind=True)
    if window is not None and table.width > window and all(version.kind is Kind.FULL for version in versions):
        table = _versions_table(versions, words, with_kind=False)
    is_cut = any(reason is not None and reason.endswith(_CUT) for reason in words)
    return [table, sentence(_WHERE_THE_REST_IS, "dim")] if is_cut else [table]


def _versions_table(versions: Sequence[Version], words: Sequence[str | None], *, with_kind: bool) -> Table:
    kind = ("KIND",) if with_kind else ()
    table = Table("VERSION", "STEP", *kind, "STATE", "SIZE", "ENGINES", "SEEN", right={"STEP", "SIZE"}, words="WHY")
    for version, reason in zip(versions, words, strict=True):
        table.add_row(
            cell(version.id),
            f"{version.step:,}",
            *((version.kind.value,) if with_kind else ()),
            version_state(version),
            size(version.bytes),
            engines_on(version),
            when(version.created_at),
            words=cell(reason),
        )
    return table


def _in_short(version: Version, window: int | None, told: Sequence[str]) -> str | None:
    """Why a version is where it is: all of it, or what fits into a line that stands beneath its row."""
    reason = why(version)
    if reason is None:
        return None
    if any(sentence.endswith(reason) for sentence in told):
        return f"'refitd explain {version.id}'"
    line = one_line(reason)
    if window is None or len(line) <= (room := max(window - INDENT, 1)):
        return reason if window is None else line
    end = line.rfind("; ", 0, room + 1)  # as a rule between two of several faults: as many as the window has room for
    return line[: room - 1 if end < 0 else end].rstrip() + _CUT


def engines_table(
    engines: Iterable[Engine],
    targets: Mapping[str, str | None],
    now: str | None = None,
) -> Table:
    """Engines, one a line: for `refitd engines`, `status` and `top` alike.

    Args:
        engines: in the order in which they stand.
        targets: the version that the engines of each run should serve.
        now: an instant, which tells how long an engine has been away.
    """
    engines = list(engines)
    shown: dict[str, Callable[[Engine], str | Text]] = {
        "ENGINE": lambda engine: cell(engine.id),
        "URL": lambda engine: cell(None if _address(engine) == engine.id else engine.url),
        "RUN": lambda engine: cell(engine.run),
        "STATE": engine_state,
        "STEP": step,
        "BEHIND": lambda engine: steps_behind(engine, targets.get(engine.run or "")),
        "SERVER": server_of,
        "PROOF": proof_of,
        "LOADS": how_it_loads,
    }
    columns = _listed_columns(engines)
    titles = [title for title in shown if title in columns]
    table = Table(*titles, right={"STEP", "BEHIND"}, words="WHY")
    for engine in engines:
        words = sentence(why_there(engine, now) or NOTHING)
        table.add_row(*(shown[title](engine) for title in titles), words=words)
    return table


def _listed_columns(engines: Collection[Engine]) -> set[str]:
    columns = {"ENGINE", "RUN", "STATE", "STEP", "BEHIND"}
    # An engine that was given no name is called by its address: to say that twice leaves no room for the reason.
    if any(_address(engine) != engine.id for engine in engines):
        columns.add("URL")
    if any(engine.plugin or engine.stock_reason for engine in engines):
        columns.add("LOADS")
    return columns | ({"SERVER", "PROOF"} if several_kinds(engines) else set())


def step(engine: Engine) -> str:
    """What an engine serves. Before anything was published that is what it was started with, unless it is a host."""
    if engine.step is not None:
        return f"{engine.step:,}"
    return "start-up" if engine.state is EngineState.IN_SYNC and engine.host is None else NOTHING


def why_there(engine: Engine, now: str | None) -> str | None:
    """Why an engine is where it is; of one that does not answer also since when, and at the instant `now` how long."""
    if engine.unreachable_since is None:
        is_new = engine.state is EngineState.IN_SYNC and engine.version is None
        told = "no version to serve yet" if is_new else through_loader(engine) or _draft(engine)
        if (wrong := setting_fault(engine.stock_reason)) is not None:
            told = f"refitd inside it stands aside: {wrong}"
        of_its_own = of_host(engine)
        why = engine.reason or of_its_own or told
        if engine.reason is not None and of_its_own is not None:
            why = f"{engine.reason}; {of_its_own}"
        # What is troubled has one of several things to be done about it, by the state itself.
        return f"{engine.state}: {why or 'no reason is known'}" if engine.state.glance is EngineGlance.TROUBLED else why
    since = f"since {engine.unreachable_since[11:16]}Z"
    if now is not None:
        away = datetime.fromisoformat(now) - datetime.fromisoformat(engine.unreachable_since)
        since += f" ({spoken(away.total_seconds())})"
    known = f"{engine.url} cannot be reached: "  # the row has said that it is this one
    told = (engine.reason or "").removeprefix(known)
    return f"{since}: {told}" if told else since


def _address(engine: Engine) -> str:
    return engine.url.removeprefix("host:").rpartition("://")[2]


def engine_state(engine: Engine) -> Text:
    """The state at a glance; whether generation is paused, and whether the version that it serves has no files yet."""
    text = Text(engine.state.glance, style=_ENGINE_STYLES[engine.state.glance])
    if engine.in_memory:
        text.append(" in memory", style="cyan")
    return text.append(" paused", style=BAD) if engine.paused else text


def several_kinds(engines: Iterable[Engine]) -> bool:
    """Whether tables say what each engine's server is: they need not where all are SGLang."""
    return any(engine.server not in {None, "SGLang"} for engine in engines)


def server_of(engine: Engine) -> Text:
    return cell(f"{engine.server or ''} {engine.server_version or ''}".strip())


def proof_of(engine: Engine) -> Text:
    """What proves what it serves, in a word; `refitd explain` has the sentence."""
    proof = engine.proof or ""
    if NOT_ALIKE in proof:
        return cell("not compared")
    if CONTRADICTED in proof:
        return cell("contradicted")
    return cell("recorded" if NOT_COMPARED in proof else proof.partition(" ")[0])


def how_it_loads(engine: Engine) -> str:
    if engine.host is not None:
        return "host"
    if engine.plugin is None:
        return "stock"
    return "loader" if engine.loads_whole else "plugin"


def through_loader(engine: Engine) -> str | None:
    """That its plugin loads all by the server's loader, which is slow, and why."""
    server = engine.server or "SGLang"  # the only one that a service knew which does not say it
    return f"each load goes through {server}'s loader: {engine.through_loader}" if engine.loads_whole else None


def _draft(engine: Engine) -> str | None:
    return None if engine.draft is None else f"draft: {engine.draft}"


def of_host(engine: Engine) -> str | None:
    """How many engines a host has in each state; None for an engine that is no host."""
    if engine.host is None:
        return None
    counts = Counter[EngineGlance]()
    for state, count in engine.host.states.items():
        counts[state.glance] += count
    return f"engines there: {', '.join(f'{counts[each]} {each}' for each in EngineGlance if counts[each]) or 'none'}"


def steps_behind(engine: Engine, target: str | None) -> str:
    """How stale an engine is, in steps of the trainer. Steps of different generations cannot be compared."""
    aim = parse_version_id(target or "")
    if aim is None:
        return NOTHING
    if engine.version == target:
        return "0"
    if engine.step is None:
        if not engine.known:
            return "unknown contents"
        return NOTHING if engine.state.is_out_of_reach or engine.host is not None else "start-up weights"
    served = parse_version_id(engine.version or "")
    if served is not None and served[0] != aim[0]:
        return "other run"
    if served is not None and served[1].generation != aim[1].generation:
        return "other generation"
    behind = aim[1].step - engine.step
    return f"{behind:,}" if behind >= 0 else f"{-behind:,} ahead"


def explanation(explained: Explanation) -> Text:
    return Text("\n").join(cell(sentence) for sentence in explained.sentences)


def outcome(result: WaitResult) -> Text:
    version = result.version
    match result.outcome:
        case WaitOutcome.SERVED:
            told = served_by(version)
        case WaitOutcome.SUPERSEDED:
            told = "was overtaken: engines serve, or are brought to, something newer"
        case WaitOutcome.SEALED | WaitOutcome.TAKEN | WaitOutcome.PENDING | WaitOutcome.FAILED:
            told = f"is {version.state}"
        case _:
            assert_never(result.outcome)
    return sentence(f"{version.id} {told}.")


def served_by(version: Version) -> str:
    """How many engines serve a version that is served, and where the others are: a quorum is enough for that."""
    told = f"is served by {engines_on(version)} engines"
    for engine in version.engines:
        if not engine.serves:
            told += f"; {engine.id} is {engine.state}" + (f" ({engine.reason})" if engine.reason else "")
    return told


def size(count: int | None) -> str:
    return NOTHING if count is None else size_of(count)


def sentence(text: str, style: str = "") -> Text:
    """A line of text that may hold what others wrote."""
    return Text(clean(text), style=style)


def line(*parts: str | Text | tuple[str, str]) -> Text:
    return Text.assemble(*parts, overflow="ellipsis", no_wrap=True)


def told(text: str, width: int | None, begin: str, style: str = "") -> list[Text]:
    """A sentence in as many lines as it needs: what to do stands at its end.

    Args:
        text: the sentence.
        width: columns that there are; None for as many as it takes.
        begin: stands before it; the other lines are indented as far.
        style: of all of it.
    """
    plain = sentence(text).plain
    rest = " " * len(begin)
    lines = [begin + plain] if width is None else wrap(plain, width, initial_indent=begin, subsequent_indent=rest)
    return [line((each, style)) for each in lines]


def cell(text: str | None) -> Text:
    return Text(clean(text) if text else NOTHING)


def span(milliseconds: float) -> str:
    """A duration with about three digits, as the dashboard writes it; from 100 s on as sentences say it."""
    if milliseconds < 9.95:
        return f"{milliseconds:.2g} ms"
    if milliseconds < 999.5:
        return f"{milliseconds:.0f} ms"
    seconds = milliseconds / 1000
    return f"{seconds:.3g} s" if seconds < 99.5 else spoken(seconds)


def by_need(engines: Iterable[Engine]) -> list[Engine]:
    """The engines, those that need an operator first, the healthy ones last; of a state in the order of their names."""
    order = EngineState.by_need()
    return sorted(engines, key=lambda engine: (order.index(engine.state), engine.id))


def counted(engines: Collection[Engine]) -> str:
    """How many engines are in each state, as "3 troubled, 997 in sync"."""
    counts = Counter(engine.state.glance for engine in engines)
    return ", ".join(f"{counts[glance]:,} {glance}" for glance in EngineGlance if counts[glance])
