"""The run as it goes: a live table on a terminal, plain lines elsewhere, or lines of JSON for programs."""

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Protocol

from refitd_embedded.demo.report import Row, Summary, verdict

COLUMNS = ("step", "reward", "served", "staleness", "publish ms", "refit ms", "disk MB", "max |Δ log p|")
LEGEND = "served 1/1: the step that each engine serves · staleness in steps · publish and refit in ms"
BAR = 20


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

    def __init__(self) -> None:
        self._headed = False

    def row(self, row: Row) -> None:
        """See `Display`."""
        if not self._headed:
            print(_line(COLUMNS), LEGEND, sep="\n", flush=True)
            self._headed = True
        print(_line(cells(row)), flush=True)

    def summary(self, summary: Summary) -> None:
        """See `Display`."""
        print("", *closing(summary), what_next(), sep="\n", flush=True)


class LiveTable:
    """A table that grows in place; when the terminal is too low for it, its last rows. `refresh` redraws it."""

    def __init__(self, refresh: Callable[[object], None], height: Callable[[], int]) -> None:
        self._refresh, self._height = refresh, height
        self._rows: list[Row] = []
        self._end: list[str] = []

    def row(self, row: Row) -> None:
        """See `Display`."""
        self._rows.append(row)
        self._draw()

    def summary(self, summary: Summary) -> None:
        """See `Display`."""
        self._end = [*closing(summary), what_next()]
        self._draw()

    def _draw(self) -> None:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(*(column for column in COLUMNS), "", header_style="bold", caption=LEGEND)
        for column in table.columns[:-1]:
            column.justify = "right"
        for row in self._rows[-max(5, self._height() - 10) :]:
            table.add_row(
                *cells(row), Text(bar(row.reward), style="green"), style="" if row.staleness == 0 else "yellow"
            )
        self._refresh(Group(table, *map(Text, self._end)))


@contextmanager
def display(*, as_json: bool) -> Generator[Display]:
    """What fits whoever is watching."""
    if as_json:
        yield JsonLines()
    elif sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.live import Live

        with Live(auto_refresh=False) as live:
            yield LiveTable(lambda shown: live.update(shown, refresh=True), lambda: live.console.height)  # pyright: ignore[reportArgumentType]
    else:
        yield PlainLines()


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
        f"Versions: {versions.published} published, {versions.served} served, {versions.collected} collected. "
        f"Largest difference of log-probabilities {summary.largest_difference:.1e}, "
        f"largest staleness {summary.largest_staleness}. {summary.seconds:.0f} s.",
    ]


def what_next() -> str:
    """What to try after the demo. `make demo` runs in an environment that the shell has not entered."""
    is_entered = sys.prefix == sys.base_prefix or os.environ.get("VIRTUAL_ENV") == sys.prefix
    enter = "" if is_entered else f". {os.path.relpath(sys.prefix)}/bin/activate; "
    return f"Next, with your own trainer and engines: {enter}refitd serve --help"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _line(words: list[str] | tuple[str, ...]) -> str:
    return "  ".join(f"{word:>{len(column)}}" for word, column in zip(words, COLUMNS, strict=True))
