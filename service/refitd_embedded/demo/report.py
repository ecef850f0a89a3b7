"""What is told of a run: a row for each step, a summary, and whether what was promised happened. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

WINDOW = 5
CLIMB = 0.1
"""A reward that grew by this much has climbed: fifty times what chance moves the mean of a step's marks by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
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
class Summary:
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


def summarise(rows: Sequence[Row], *, publishing: bool, versions: Counts, seconds: float) -> Summary:
    """The summary of at least one row."""
    window = max(1, min(WINDOW, len(rows) // 2))
    return Summary(
        steps=rows[-1].step,
        publishing=publishing,
        first_reward=_mean_reward(rows[:window]),
        last_reward=_mean_reward(rows[-window:]),
        versions=versions,
        largest_difference=max(row.difference for row in rows),
        largest_staleness=max(row.staleness for row in rows),
        seconds=seconds,
    )


def verdict(summary: Summary) -> str:
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


def _mean_reward(rows: Sequence[Row]) -> float:
    return sum(row.reward for row in rows) / len(rows)
