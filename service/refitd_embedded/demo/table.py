"""What is shown of a run: a live table on a terminal, plain lines elsewhere, or lines of JSON for programs.

A run has a row for each step, a summary, and a verdict whether what was promised happened.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean

WINDOW = 5
CLIMB = 0.1
"""A reward that grew by this much has climbed: fifty times what chance moves the mean of a step's marks by."""
COLUMNS = ("step", "reward", "served", "stale", "publish", "refit", "disk", "Δ log p")
LEGEND = (
    "served: the step that each engine serves · stale: steps behind the trainer",
    "publish, refit: ms · disk: MB · Δ log p: trainer against engine, the largest",
)
BAR = 8  # with the columns it fits into 80


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step, counted in gradient steps that the trainer had taken when it asked for rollouts.

    `reward` is the engines' mean, in [0, 1]. `served_by` has, for each engine's URL, the oldest version among its
    rollouts, as the step that made it; `served` is the oldest of these. `publish_ms` is until the version was safe on
    disk, `refit_ms` from there until every engine was proved to serve it; None without publishing. `disk_bytes` is what
    the root holds, `difference` the largest between an engine's log-probability and the trainer's own for the version
    claimed, in nats.
    """

    step: int
    reward: float
    served_by: dict[str, int]
    difference: float
    disk_bytes: int
    publish_ms: float | None = None
    refit_ms: float | None = None

    @property
    def served(self) -> int:
        """The oldest version that any engine answered with."""
        return min(self.served_by.values())

    @property
    def staleness(self) -> int:
        """How many gradient steps the rollouts are behind the trainer."""
        return self.step - self.served


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Versions: published, proved to be served, and deleted again by the service."""

    published: int = 0
    served: int = 0
    collected: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSummary:
    """A run as a whole. `first_reward` and `last_reward` are means over a few steps, `seconds` is all of it."""

    steps: int
    publishing: bool
    first_reward: float
    last_reward: float
    versions: Counts
    largest_difference: float
    largest_staleness: int
    seconds: float

    @property
    def climbed(self) -> bool:
        """Whether the engines' reward grew by more than chance can explain."""
        return self.last_reward - self.first_reward >= CLIMB

    @property
    def as_promised(self) -> bool:
        """With publishing the reward climbs; without, engines serve what they started on, and it does not."""
        return self.climbed == self.publishing


def summarise(rows: Sequence[StepRow], *, publishing: bool, versions: Counts, seconds: float) -> DemoSummary:
    """The summary of a run.

    Args:
        rows: its rows, at least one.
        publishing: whether versions were published.
        versions: how many were published, served and collected.
        seconds: what it took.
    """
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


class JsonLines:
    """`{"kind": "step", …}` for each row and `{"kind": "summary", …}` at the end."""

    def row(self, row: StepRow) -> None:
        """Show one more row."""
        self._print({"kind": "step", **asdict(row), "served": row.served, "staleness": row.staleness})

    def summary(self, summary: DemoSummary) -> None:
        """Show how it ended."""
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
        """Show one more row."""
        if not self._headed:
            print(_line(COLUMNS), *LEGEND, sep="\n", flush=True)
            self._headed = True
        print(_line(cells(row)), flush=True)

    def summary(self, summary: DemoSummary) -> None:
        """Show how it ended."""
        print("", *closing(summary), self._then, sep="\n", flush=True)


class LiveTable:
    """A table that grows in place; when the terminal is too low for it, its last rows. `refresh` redraws it;
    `then` is the last line.
    """

    def __init__(self, refresh: Callable[[object], None], height: Callable[[], int], then: str) -> None:
        self._refresh, self._height, self._then = refresh, height, then
        self._rows: list[StepRow] = []
        self._end: list[str] = []

    def row(self, row: StepRow) -> None:
        """Show one more row."""
        self._rows.append(row)
        self._draw()

    def summary(self, summary: DemoSummary) -> None:
        """Show how it ended."""
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
        for row in self._rows[-max(5, self._height() - 12) :]:
            table.add_row(
                *cells(row), Text(bar(row.reward), style="green"), style="" if row.staleness == 0 else "yellow"
            )
        legend = (Text(line, style="dim") for line in LEGEND)  # no caption: that is as narrow as the table
        self._refresh(Group(table, *legend, *map(Text, self._end)))


@contextmanager
def display(*, as_json: bool, then: str | None = None) -> Generator[JsonLines | PlainLines | LiveTable]:
    """The display that fits: JSON, a live table on a terminal, else lines. `then` is the last line, None for advice."""
    last = what_next() if then is None else then
    if as_json:
        yield JsonLines()
    elif sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.live import Live

        with Live(auto_refresh=False) as live:
            refresh = partial(live.update, refresh=True)
            yield LiveTable(refresh, lambda: live.console.height, last)  # pyright: ignore[reportArgumentType]
    else:
        yield PlainLines(last)


def cells(row: StepRow) -> list[str]:
    """A row's columns. What is served has a number for each engine: `7/7`."""
    return [
        str(row.step),
        f"{row.reward:.3f}",
        "/".join(map(str, row.served_by.values())),
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
    """The last lines."""
    versions = summary.versions
    return [
        verdict(summary),
        f"Versions: {versions.published} published, {versions.served} served, {versions.collected} collected.",
        f"At most: {summary.largest_difference:.1e} between log-probabilities, {summary.largest_staleness} steps "
        f"stale. {summary.seconds:.0f} s.",
    ]


def what_next() -> str:
    """What to try after the demo. `make demo` runs in an environment that the shell has not entered."""
    is_entered = sys.prefix == sys.base_prefix or os.environ.get("VIRTUAL_ENV") == sys.prefix
    enter = "" if is_entered else f". {os.path.relpath(sys.prefix)}/bin/activate; "
    return f"Next, with your own engines: {enter}refitd serve --help"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _line(words: list[str] | tuple[str, ...]) -> str:
    return "  ".join(f"{word:>{len(column)}}" for word, column in zip(words, COLUMNS, strict=True))
