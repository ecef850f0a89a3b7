"""What the demo tells: staleness, whether the reward climbed, and how each row looks."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from rich.console import Console

from refitd_embedded.demo import DemoOptions
from refitd_embedded.demo.table import (
    BAR,
    COLUMNS,
    LEGEND,
    Counts,
    DemoSummary,
    Incident,
    JsonLines,
    LiveTable,
    PlainLines,
    StepRow,
    cells,
    display,
    summarise,
    verdict,
    what_next,
)


def row(step: int, reward: float, served: int | None = None, **changes: Any) -> StepRow:
    serving = {"http://a": step, "http://b": step if served is None else served}
    facts: dict[str, Any] = {"served_by": serving, "difference": 1e-6, "disk_bytes": 1_600_000}
    return StepRow(step=step, reward=reward, **facts | changes)


def summary(rewards: list[float], *, publishing: bool = True) -> DemoSummary:
    rows = [row(step, reward) for step, reward in enumerate(rewards)]
    return summarise(rows, publishing=publishing, versions=Counts(), seconds=1.0)


KILLED = Incident(step=400, what="engine-b was killed", ended="back on step 404 after 12 s", as_promised=True)
CLIMBING = [0.03, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
FLAT = [0.03, 0.02, 0.04, 0.03, 0.03, 0.02, 0.03, 0.04, 0.03, 0.02, 0.03]


@pytest.mark.parametrize(
    ("rewards", "publishing", "as_promised"),
    [(CLIMBING, True, True), (FLAT, True, False), (FLAT, False, True), (CLIMBING, False, False)],
)
def test_with_publishing_the_reward_must_climb_and_without_it_must_not(
    rewards: list[float], publishing: bool, as_promised: bool
) -> None:
    assert summary(rewards, publishing=publishing).as_promised is as_promised


@pytest.mark.parametrize("publishing", [True, False])
@pytest.mark.parametrize("rewards", [CLIMBING, FLAT])
def test_the_verdict_says_what_was_measured(rewards: list[float], publishing: bool) -> None:
    found = summary(rewards, publishing=publishing)
    assert ("did not climb" in verdict(found)) is not found.climbed
    assert f"{found.first_reward:.2f} → {found.last_reward:.2f}" in verdict(found)


@pytest.mark.parametrize(("reward", "bar"), [(1.0, ["█" * BAR]), (0.0, [])])
def test_at_eighty_columns_no_line_of_the_demo_is_cut_or_broken(
    capsys: pytest.CaptureFixture[str], reward: float, bar: list[str]
) -> None:
    long = row(400, reward, served=400, publish_ms=12345.0, refit_ms=12345.0)
    drawn: list[Any] = []
    for shown in (PlainLines(what_next()), LiveTable(drawn.append, lambda: 40, what_next())):
        shown.row(long)
        shown.tell(400, "REJECTED, and no engine loaded it: " + "tensor w has 1 non-finite value " * 5)
        for rows, publishing in product((CLIMBING, FLAT), (True, False)):
            shown.summary(replace(summary(rows, publishing=publishing), incidents=[KILLED]))
    console = Console(width=80, height=40)
    with console.capture() as capture:
        console.print(drawn[-1])
    plain, live = capsys.readouterr().out.splitlines(), capture.get().splitlines()
    assert max(map(len, plain)) <= 80
    (head,) = [line for line in live if "step" in line and "reward" in line]
    assert head.split() == " ".join(COLUMNS).split()
    (drawn_row,) = [line for line in live if "400/400" in line]
    assert drawn_row.split() == [*cells(long), *bar]
    assert {*LEGEND, *plain[-3:]} <= {line.strip() for line in live}


@pytest.mark.parametrize(
    ("terminal", "options", "kind"),
    [
        ({"TERM": "xterm"}, {}, LiveTable),
        ({"TERM": "xterm", "NO_COLOR": "1"}, {}, LiveTable),
        ({"TERM": "xterm"}, {"plain": True}, PlainLines),
        ({"TERM": "xterm"}, {"json": True}, JsonLines),
        ({"TERM": "dumb"}, {}, PlainLines),
        (None, {}, PlainLines),
    ],
)
def test_only_a_terminal_gets_a_table_that_is_drawn_again(
    terminal: dict[str, str] | None, options: dict[str, Any], kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (terminal or {}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal is not None)
    with display(DemoOptions(**options)) as shown:
        assert isinstance(shown, kind)
