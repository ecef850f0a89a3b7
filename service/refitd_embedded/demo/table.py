"""What is shown of a run: a live table on a terminal, plain lines elsewhere, or lines of JSON for programs.

A run has a row for each step, a summary, and a verdict whether what was promised happened.
"""

import json
import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from statistics import fmean
from textwrap import wrap
from typing import Protocol

from refitd_embedded.demo import DemoOptions

WINDOW = 5
CLIMB = 0.1
"""A reward that grew by this much has climbed: fifty times what chance moves the mean of a step's marks by."""
COLUMNS = ("step", "reward", "served", "stale", "publish", "refit", "disk", "Δ log p")
LEGEND = (
    "served: the step that each engine serves · stale: steps behind the trainer",
    "publish, refit: ms · disk: MB · Δ log p: trainer against engine, the largest",
)
BAR = 8  # with the columns it fits into 80
WIDTH = 80
_FRAME = 7  # lines: the head, those around the table's titles, the legend, and an empty one


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step, counted in gradient steps that the trainer had taken when it asked for rollouts.

    `reward` is the engines' mean, in [0, 1]. `served_by` has, for each engine's URL, the oldest version among its
    rollouts, as the step that made it, and None where it gave none; `served` is the oldest of these. `publish_ms` is
    until the version was safe on disk, `refit_ms` from there until every engine was proved to serve it; None without
    publishing, and where the version was rejected. `disk_bytes` is what the root holds, `difference` the largest
    between an engine's log-probability and the trainer's own for the version claimed, in nats.
    """

    step: int
    reward: float
    served_by: dict[str, int | None]
    difference: float
    disk_bytes: int
    publish_ms: float | None = None
    refit_ms: float | None = None

    @property
    def served(self) -> int:
        """The oldest version that any engine answered with."""
        return min(step for step in self.served_by.values() if step is not None)

    @property
    def staleness(self) -> int:
        """How many gradient steps the rollouts are behind the trainer."""
        return self.step - self.served


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Versions: published, proved to be served, rejected, and deleted again by the service."""

    published: int = 0
    served: int = 0
    rejected: int = 0
    collected: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Something that the demo broke by itself: the step at which it was broken, what it was, and how it ended."""

    step: int
    what: str
    ended: str
    as_promised: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSummary:
    """A run as a whole. `first_reward` and `last_reward` are means over a few steps, `seconds` is all of it.

    `incidents` are those that the demo caused.
    """

    steps: int
    publishing: bool
    first_reward: float
    last_reward: float
    versions: Counts
    largest_difference: float
    largest_staleness: int
    seconds: float
    incidents: Sequence[Incident] = ()

    @property
    def climbed(self) -> bool:
        """Whether the engines' reward grew by more than chance can explain."""
        return self.last_reward - self.first_reward >= CLIMB

    @property
    def as_promised(self) -> bool:
        """With publishing the reward climbs; without, engines serve what they started on, and it does not.

        Each incident ended as refitd promises.
        """
        return self.climbed == self.publishing and all(incident.as_promised for incident in self.incidents)


def summarise(
    rows: Sequence[StepRow],
    *,
    publishing: bool,
    versions: Counts,
    seconds: float,
    incidents: Sequence[Incident] = (),
) -> DemoSummary:
    window = max(1, min(WINDOW, len(rows) // 2))
    return DemoSummary(
        steps=rows[-1].step,
        publishing=publishing,
        first_reward=fmean(row.reward for row in rows[:window]),
        last_reward=fmean(row.reward for row in rows[-window:]),
        versions=versions,
        largest_difference=max(row.difference for row in rows),
        largest_staleness=max(row.staleness for row in rows),
        seconds=seconds,
        incidents=sorted(incidents, key=lambda incident: incident.step),
    )


def verdict(summary: DemoSummary) -> str:
    """The summary in a sentence or two."""
    change = f"{summary.first_reward:.2f} → {summary.last_reward:.2f}"
    match summary.publishing, summary.climbed:
        case True, True:
            return f"The engines learnt: their reward climbed, {change}."
        case True, False:
            return f"The engines' reward did not climb, {change}: it takes about 20 --steps."
        case False, False:
            return f"Nothing was published, and the engines' reward did not climb, {change}."
        case _:
            return f"The engines' reward climbed, {change}, with nothing published: a fault."


class Display(Protocol):
    """Where a run is shown."""

    def row(self, row: StepRow) -> None:
        """Show one more row."""
        ...

    def tell(self, step: int, text: str) -> None:
        """Show that something happened at a step: a failure, or how it ended."""
        ...

    def summary(self, summary: DemoSummary) -> None:
        """Show how the run ended."""
        ...


class JsonLines:
    """`{"kind": "step", …}` for each row, `{"kind": "told", …}` for a failure, `{"kind": "summary", …}` at the end."""

    def row(self, row: StepRow) -> None:
        self._print({"kind": "step", **asdict(row), "served": row.served, "staleness": row.staleness})

    def tell(self, step: int, text: str) -> None:
        self._print({"kind": "told", "step": step, "text": text})

    def summary(self, summary: DemoSummary) -> None:
        judged = {"climbed": summary.climbed, "as_promised": summary.as_promised}
        self._print({"kind": "summary", **asdict(summary), **judged})

    def _print(self, content: dict[str, object]) -> None:
        print(json.dumps(content), flush=True)


class PlainLines:
    """One line a row, for logs. `then` is the last line."""

    def __init__(self, then: str) -> None:
        self._headed = False
        self._then = then

    def row(self, row: StepRow) -> None:
        if not self._headed:
            print(_line(COLUMNS), *LEGEND, sep="\n", flush=True)
            self._headed = True
        print(_line(cells(row)), flush=True)

    def tell(self, step: int, text: str) -> None:
        print(*told(step, text), sep="\n", flush=True)

    def summary(self, summary: DemoSummary) -> None:
        print("", *closing(summary), self._then, sep="\n", flush=True)


class LiveTable:
    """A table that grows in place; when the terminal is too low for it, its last rows.

    Args:
        refresh: redraws it.
        height: lines of the terminal.
        then: the last line.
        head: the first line.
    """

    def __init__(self, refresh: Callable[[object], None], height: Callable[[], int], then: str, head: str = "") -> None:
        self._refresh, self._height, self._then, self._head = refresh, height, then, head
        self._rows: list[StepRow] = []
        self._told: list[str] = []
        self._end: list[str] = []

    def row(self, row: StepRow) -> None:
        self._rows.append(row)
        self._draw()

    def tell(self, step: int, text: str) -> None:
        self._told += told(step, text)
        self._draw()

    def summary(self, summary: DemoSummary) -> None:
        self._end = ["", *closing(summary), self._then]
        self._draw()

    def _draw(self) -> None:
        from rich import box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(*COLUMNS, "", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
        for column in table.columns[:-1]:
            column.justify = "right"
        below = [*self._told, *self._end]
        for row in self._rows[-max(3, self._height() - len(below) - _FRAME) :]:
            table.add_row(
                *cells(row), Text(bar(row.reward), style="green"), style="" if row.staleness == 0 else "yellow"
            )
        head = (Text(line, style="bold") for line in (self._head,) if line)
        legend = (Text(line, style="dim") for line in LEGEND)  # no caption: that is as narrow as the table
        happened = (Text(line, style="cyan") for line in self._told)
        self._refresh(Group(*head, table, *legend, *happened, *map(Text, self._end)))


@contextmanager
def display(options: DemoOptions, service_url: str = "") -> Generator[Display]:
    """The display that fits: JSON, a live table on a terminal, else lines."""
    last = what_next() if options.then is None else options.then
    if options.json:
        yield JsonLines()
    elif is_live(sys.stdout.isatty()) and not options.plain:
        from rich.live import Live

        with Live(auto_refresh=False) as live:
            refresh = partial(live.update, refresh=True)
            head = f"Dashboard: {service_url}"
            yield LiveTable(refresh, lambda: live.console.height, last, head)  # pyright: ignore[reportArgumentType]
    else:
        yield PlainLines(last)


def is_live(is_terminal: bool) -> bool:
    """Whether lines can be drawn again, and Rich is there to do it."""
    return is_terminal and os.environ.get("TERM") != "dumb" and find_spec("rich") is not None


def told(step: int, text: str) -> list[str]:
    """What happened at a step, in lines of a narrow terminal."""
    return wrap(f"step {step}: {text}", WIDTH, subsequent_indent="    ", break_on_hyphens=False)


def cells(row: StepRow) -> list[str]:
    """A row's columns. What is served has a number for each engine: `7/7`."""
    return [
        str(row.step),
        f"{row.reward:.3f}",
        "/".join("-" if step is None else str(step) for step in row.served_by.values()),
        str(row.staleness),
        _milliseconds(row.publish_ms),
        _milliseconds(row.refit_ms),
        f"{row.disk_bytes / 1e6:.1f}",
        f"{row.difference:.1e}",
    ]


def bar(reward: float) -> str:
    """A reward in [0, 1] as a bar."""
    return "█" * round(reward * BAR)


def closing(summary: DemoSummary) -> list[str]:
    versions = summary.versions
    return [
        verdict(summary),
        *(f"Step {incident.step}, {incident.what}: {incident.ended}." for incident in summary.incidents),
        f"Versions: {versions.published} published, {versions.served} served, {versions.rejected} rejected, "
        f"{versions.collected} deleted again.",
        f"At most: {summary.largest_difference:.1e} between log-probabilities, {summary.largest_staleness} "
        f"{'step' if summary.largest_staleness == 1 else 'steps'} stale. {summary.seconds:.0f} s.",
    ]


def what_next() -> str:
    """What to try after the demo. `make demo` runs in an environment that the shell has not entered."""
    is_entered = sys.prefix == sys.base_prefix or os.environ.get("VIRTUAL_ENV") == sys.prefix
    enter = "" if is_entered else f". {os.path.relpath(sys.prefix)}/bin/activate; "
    return f"Next, docs/quickstart.md: {enter}refitd serve --help"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _line(words: list[str] | tuple[str, ...]) -> str:
    return "  ".join(f"{word:>{len(column)}}" for word, column in zip(words, COLUMNS, strict=True))
