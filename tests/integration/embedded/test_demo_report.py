"""What the demo tells: staleness, whether the reward climbed, and how each row looks."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
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


def test_staleness_is_how_far_the_served_version_is_behind_the_trainer() -> None:
    assert row(7, 0.1, served=7).staleness == 0
    assert row(7, 0.1, served=4).staleness == 3


@pytest.mark.parametrize(
    ("rewards", "publishing", "as_promised"),
    [(CLIMBING, True, True), (FLAT, True, False), (FLAT, False, True), (CLIMBING, False, False)],
)
def test_with_publishing_the_reward_must_climb_and_without_it_must_not(
    rewards: list[float], publishing: bool, as_promised: bool
) -> None:
    assert summary(rewards, publishing=publishing).as_promised is as_promised


def test_an_incident_that_did_not_end_as_promised_is_none_of_the_promise() -> None:
    assert replace(summary(CLIMBING), incidents=[KILLED]).as_promised
    assert not replace(summary(CLIMBING), incidents=[replace(KILLED, as_promised=False)]).as_promised


def test_first_and_last_reward_are_means_of_five_steps_or_of_half_the_run() -> None:
    assert summary(CLIMBING).first_reward == pytest.approx(0.136)
    assert summary(CLIMBING).last_reward == pytest.approx(0.7)
    assert summary([0.0, 0.2, 0.4, 0.6]).last_reward == pytest.approx(0.5)
    assert summary([0.5]).climbed is False


def test_a_summary_has_the_worst_of_all_steps() -> None:
    rows = [row(0, 0.0, difference=1e-5), row(5, 0.0, served=1), row(6, 0.0)]
    found = summarise(rows, publishing=True, versions=Counts(published=3, served=2, collected=1), seconds=1.0)
    assert (found.largest_difference, found.largest_staleness, found.steps) == (1e-5, 4, 6)


@pytest.mark.parametrize("publishing", [True, False])
@pytest.mark.parametrize("rewards", [CLIMBING, FLAT])
def test_the_verdict_says_what_was_measured(rewards: list[float], publishing: bool) -> None:
    found = summary(rewards, publishing=publishing)
    assert ("did not climb" in verdict(found)) is not found.climbed
    assert f"{found.first_reward:.2f} → {found.last_reward:.2f}" in verdict(found)


def test_a_row_names_what_each_engine_serves_and_the_laggard_makes_the_staleness() -> None:
    assert cells(row(7, 0.5, served=5))[2:4] == ["7/5", "2"]


def test_without_publishing_a_row_has_no_times() -> None:
    assert cells(row(1, 0.5, publish_ms=41.4, refit_ms=160.0))[4:6] == ["41", "160"]
    assert cells(row(1, 0.5))[4:6] == ["-", "-"]
    assert len(cells(row(1, 0.5))) == len(COLUMNS)


def test_an_engine_that_gave_no_rollouts_has_a_dash_and_makes_nothing_stale() -> None:
    away = StepRow(step=7, reward=0.5, served_by={"http://a": 7, "http://b": None}, difference=0.0, disk_bytes=0)
    assert cells(away)[2:4] == ["7/-", "0"]


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    JsonLines().row(row(7, 0.5, served=5))
    JsonLines().tell(7, "an engine is killed")
    JsonLines().summary(summary(CLIMBING))
    step, told, end = map(json.loads, capsys.readouterr().out.splitlines())
    assert (step["kind"], step["staleness"], step["reward"]) == ("step", 2, 0.5)
    assert (step["served"], step["served_by"]) == (5, {"http://a": 7, "http://b": 5})
    assert told == {"kind": "told", "step": 7, "text": "an engine is killed"}
    assert (end["kind"], end["climbed"], end["as_promised"]) == ("summary", True, True)
    assert end["versions"] == {"published": 0, "served": 0, "rejected": 0, "collected": 0}


def test_plain_lines_have_one_head(capsys: pytest.CaptureFixture[str]) -> None:
    plain = PlainLines("and then")
    plain.row(row(0, 0.1))
    plain.row(row(1, 0.2))
    plain.tell(1, "an engine is killed")
    plain.summary(summary(FLAT))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["step", "served:", "publish,", "0", "1"]
    assert tuple(lines[1:3]) == LEGEND
    assert lines[5] == "step 1: an engine is killed"
    assert lines[7] == verdict(summary(FLAT))
    assert lines[-1] == "and then"


def test_the_last_line_is_what_to_try_next_unless_another_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    for then, last in ((None, what_next()), ("docker compose down", "docker compose down")):
        with display(DemoOptions(then=then)) as shown:
            shown.summary(summary(CLIMBING))
        assert capsys.readouterr().out.splitlines()[-1] == last


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


def test_the_next_step_enters_the_environment_where_the_shell_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.prefix", str(Path(".venv").resolve()))
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    assert what_next().endswith(": . .venv/bin/activate; refitd serve --help")
    monkeypatch.setenv("VIRTUAL_ENV", str(Path(".venv").resolve()))
    assert what_next().endswith(": refitd serve --help")


def test_a_live_table_keeps_its_last_rows_within_the_terminal() -> None:
    drawn: list[Any] = []
    table = LiveTable(drawn.append, lambda: 24, what_next(), "Dashboard: http://127.0.0.1:8700")
    for step in range(30):
        table.row(row(step, step / 30))
    table.tell(12, "engine-b is killed")
    table.tell(16, "engine-b is back")
    table.summary(replace(summary(CLIMBING), incidents=[KILLED]))
    console = Console(width=120, height=24)
    with console.capture() as capture:
        console.print(drawn[-1])
    text = capture.get()
    assert len(text.splitlines()) <= 24
    assert all(line in text for line in ("Dashboard: http", "step 12: engine-b is killed", "step 16: engine-b is back"))
    assert " 29 " in text
    assert " 5 " not in text
    assert all(line in text for line in LEGEND)
    assert "climbed" in text
