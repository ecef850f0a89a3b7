"""The run as it goes: a live table on a terminal, plain lines elsewhere, or lines of JSON for programs."""

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Protocol

from refitd_embedded.demo.report import Row, Summary, verdict

COLUMNS = ("step", "reward", "served", "stale", "publish", "refit", "disk", "Δ log p")
LEGEND = (
    "served: the step that each engine serves · stale: steps behind the trainer",
    "publish, refit: ms · disk: MB · Δ log p: trainer against engine, the largest",
)
BAR = 8  # with the columns it fits into 80


class Display(Protocol):
    """Shows rows as they come, and then the summary."""

    def row(self, row: Row) -> None:
        """Show one more row."""
        ...

    def summary(self, summary: Summary) -> None:
        """Show how it ended."""
        ...


class JsonLines:
    """`{"kind": "step", …}` for each row and `{"kind": "summary", …}` at the end."""

    def row(self, row: Row) -> None:
        """See `Display`."""
        self._print({"kind": "step", **asdict(row), "served": row.served, "staleness": row.staleness})

    def summary(self, summary: Summary) -> None:
        """See `Display`."""
        judged = {"climbed": summary.climbed, "as_promised": summary.as_promised}
        self._print({"kind": "summary", **asdict(summary), **judged})

    def _print(self, content: dict[str, object]) -> None:
        print(json.dumps(content), flush=True)


class PlainLines:
    """One line a row, for logs."""

    def __init__(self, then: str) -> None:
        """`then` is said last."""
        self._headed = False
        self._then = then

    def row(self, row: Row) -> None:
        """See `Display`."""
        if not self._headed:
            print(_line(COLUMNS), *LEGEND, sep="\n", flush=True)
            self._headed = True
        print(_line(cells(row)), flush=True)

    def summary(self, summary: Summary) -> None:
        """See `Display`."""
        print("", *closing(summary), self._then, sep="\n", flush=True)


class LiveTable:
    """A table that grows in place; when the terminal is too low for it, its last rows. `refresh` redraws it."""

    def __init__(self, refresh: Callable[[object], None], height: Callable[[], int], then: str) -> None:
        """`then` is said last."""
        self._refresh, self._height, self._then = refresh, height, then
        self._rows: list[Row] = []
        self._end: list[str] = []

    def row(self, row: Row) -> None:
        """See `Display`."""
        self._rows.append(row)
        self._draw()

    def summary(self, summary: Summary) -> None:
        """See `Display`."""
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
def display(*, as_json: bool, then: str | None = None) -> Generator[Display]:
    """What fits whoever is watching. `then` is the last line, in place of what to try after a demo of one's own."""
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


def cells(row: Row) -> list[str]:
    """A row's columns. What is served is told engine by engine: `7/7`."""
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


def closing(summary: Summary) -> list[str]:
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
