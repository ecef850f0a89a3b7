"""What is shown of a run: a table that grows line by line, or lines of JSON for programs.

A run has a row for each step, a summary, and a verdict whether its promises held.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from textwrap import wrap

from refitd_embedded.demo import DemoOptions

WINDOW = 5
CLIMB = 0.1
"""A reward that grew by this much has climbed: fifty times the deviation of a step's mean by chance."""
COLUMNS = ("step", "reward", "served", "stale", "publish", "refit", "disk", "Δ log p")
LEGEND = (
    "served: the step that each engine serves · stale: steps behind the trainer",
    "publish, refit: ms · disk: MB · Δ log p: trainer against engine, the largest",
)
BAR = 8  # with the columns it fits into 80
WIDTH = 80
GREEN, YELLOW, CYAN = 32, 33, 36


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step, counted in gradient steps that the trainer had taken when it asked for rollouts.

    `reward` is the engines' mean, in [0, 1]. `served_by` has, for each engine's URL, the oldest version among its
    rollouts, as the step that made it, and None for an engine without rollouts; `served` is the oldest of these.
    `publish_ms` is until the version was safe on disk, `refit_ms` from there until every engine was proved to serve it;
    None without publishing, and where the version was rejected. `disk_bytes` is the size of the root, `difference` the
    largest between an engine's log-probability and the trainer's own for the version claimed, in nats.
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
        return min(step for step in self.served_by.values() if step is not None)

    @property
    def staleness(self) -> int:
        """How many gradient steps the rollouts are behind the trainer."""
        return self.step - self.served


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Something that the demo did to the run: the step at which it did it, and how it ended."""

    step: int
    what: str
    ended: str
    as_promised: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSummary:
    """A run as a whole. `first_reward` and `last_reward` are means over a few steps, `seconds` is all of it.

    `versions` counts those that were published, proved to be served, rejected, and collected by the service.
    """

    steps: int
    publishing: bool
    first_reward: float
    last_reward: float
    versions: dict[str, int]
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
        """With publishing the reward climbs; without, engines serve their first weights, and it does not.

        Each incident ended as refitd promises.
        """
        return self.climbed == self.publishing and all(incident.as_promised for incident in self.incidents)


def summarise(
    rows: Sequence[StepRow],
    *,
    publishing: bool,
    versions: dict[str, int],
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


class Display:
    """Prints a run as JSON, or as a table; a table is `painted` with bars and colours."""

    def __init__(self, *, as_json: bool = False, painted: bool = False) -> None:
        self._as_json, self._painted, self._is_headed = as_json, painted, False

    @classmethod
    def of(cls, options: DemoOptions) -> "Display":
        is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")
        return cls(as_json=options.json, painted=is_terminal and not options.plain)

    def row(self, row: StepRow) -> None:
        if self._as_json:
            self._print({"kind": "step", **asdict(row), "served": row.served, "staleness": row.staleness})
            return
        if not self._is_headed:
            print(_line(COLUMNS), *LEGEND, sep="\n", flush=True)
            self._is_headed = True
        line, bar = _line(cells(row)), "█" * round(row.reward * BAR)
        if self._painted:
            line = f"{_paint(line, YELLOW) if row.staleness else line}  {_paint(bar, GREEN)}"
        print(line, flush=True)

    def tell(self, step: int, text: str) -> None:
        """Show that something happened at a step."""
        if self._as_json:
            self._print({"kind": "told", "step": step, "text": text})
            return
        lines = wrap(f"step {step}: {text}", WIDTH, subsequent_indent="    ", break_on_hyphens=False)
        print(*(_paint(line, CYAN) if self._painted else line for line in lines), sep="\n", flush=True)

    def summary(self, summary: DemoSummary) -> None:
        if self._as_json:
            judged = {"climbed": summary.climbed, "as_promised": summary.as_promised}
            self._print({"kind": "summary", **asdict(summary), **judged})
            return
        versions = ", ".join(f"{count} {what}" for what, count in summary.versions.items())
        print(
            "",
            verdict(summary),
            *(f"Step {incident.step}, {incident.what}: {incident.ended}." for incident in summary.incidents),
            f"Versions: {versions}.",
            f"At most: {summary.largest_difference:.1e} between log-probabilities, {summary.largest_staleness} "
            f"{'step' if summary.largest_staleness == 1 else 'steps'} stale. {summary.seconds:.0f} s.",
            f"Next, docs/quickstart.md: {enter_environment()}refitd serve --help",
            sep="\n",
            flush=True,
        )

    def _print(self, content: dict[str, object]) -> None:
        print(json.dumps(content), flush=True)


def enter_environment() -> str:
    """How the shell enters this environment, where it has not: `make demo` runs in one of its own."""
    is_entered = sys.prefix == sys.base_prefix or os.environ.get("VIRTUAL_ENV") == sys.prefix
    return "" if is_entered else f". {os.path.relpath(sys.prefix)}/bin/activate; "


def cells(row: StepRow) -> list[str]:
    """A row's columns. `served` has a number for each engine: `7/7`."""
    return [
        str(row.step),
        f"{row.reward:.3f}",
        "/".join("-" if step is None else str(step) for step in row.served_by.values()),
        str(row.staleness),
        *("-" if ms is None else f"{ms:.0f}" for ms in (row.publish_ms, row.refit_ms)),
        f"{row.disk_bytes / 1e6:.1f}",
        f"{row.difference:.1e}",
    ]


def _line(words: Sequence[str]) -> str:
    return "  ".join(f"{word:>{len(column)}}" for word, column in zip(words, COLUMNS, strict=True))


def _paint(text: str, colour: int) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m" if text else ""
