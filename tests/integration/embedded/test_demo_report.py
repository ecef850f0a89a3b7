"""What the demo prints: staleness, whether the reward climbed, and how each row looks."""

from dataclasses import replace
from typing import Any

import pytest

from refitd_embedded.demo import DemoOptions
from refitd_embedded.demo.table import BAR, COLUMNS, LEGEND, DemoSummary, Display, Incident, StepRow, summarise, verdict

KILLED = Incident(step=400, what="engine-b was killed", ended="back on step 404 after 12 s", as_promised=True)
CLIMBING = [0.03, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
FLAT = [0.03, 0.02, 0.04, 0.03, 0.03, 0.02, 0.03, 0.04, 0.03, 0.02, 0.03]


def row(step: int, reward: float, served: int | None = None, **changes: Any) -> StepRow:
    serving = {"http://a": step, "http://b": step if served is None else served}
    facts: dict[str, Any] = {"served_by": serving, "difference": 1e-6, "disk_bytes": 1_600_000}
    return StepRow(step=step, reward=reward, **facts | changes)


def summary(rewards: list[float], *, publishing: bool = True) -> DemoSummary:
    rows = [row(step, reward) for step, reward in enumerate(rewards)]
    return summarise(rows, publishing=publishing, versions={"published": 3}, seconds=1.0)


@pytest.mark.parametrize(
    ("rewards", "publishing", "as_promised"),
    [(CLIMBING, True, True), (FLAT, True, False), (FLAT, False, True), (CLIMBING, False, False)],
)
def test_with_publishing_the_reward_must_climb_and_without_it_must_not(
    rewards: list[float], publishing: bool, as_promised: bool
) -> None:
    found = summary(rewards, publishing=publishing)
    assert found.as_promised is as_promised
    assert not replace(found, incidents=[replace(KILLED, as_promised=False)]).as_promised
    assert ("did not climb" in verdict(found)) is not found.climbed
    assert f"{found.first_reward:.2f} → {found.last_reward:.2f}" in verdict(found)


@pytest.mark.parametrize("painted", [False, True])
def test_a_table_has_one_head_fits_into_eighty_columns_and_ends_with_what_to_try_next(
    painted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = Display(painted=painted)
    shown.row(row(399, 1.0, served=398, publish_ms=12345.0, refit_ms=12345.0))
    shown.row(row(400, 1.0, publish_ms=12345.0, refit_ms=12345.0))
    shown.tell(400, "REJECTED, and no engine loaded it: " + "tensor w has 1 non-finite value " * 5)
    shown.summary(replace(summary(FLAT), incidents=[KILLED]))
    text = capsys.readouterr().out
    assert ("\x1b[" in text, "█" * BAR in text) == (painted, painted)
    for code in (32, 33, 36, 0):
        text = text.replace(f"\x1b[{code}m", "")
    lines = text.splitlines()
    assert lines[0].split() == " ".join(COLUMNS).split()
    assert tuple(lines[1:3]) == LEGEND
    assert [line.split()[0] for line in lines[3:6]] == ["399", "400", "step"]
    assert verdict(summary(FLAT)) in lines
    assert lines[-1].endswith("refitd serve --help")
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("terminal", "plain", "painted"),
    [
        ({"TERM": "xterm"}, False, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False, False),
        ({"TERM": "xterm"}, True, False),
        ({"TERM": "dumb"}, False, False),
        (None, False, False),
    ],
)
def test_only_a_terminal_gets_bars_and_colours(
    terminal: dict[str, str] | None, plain: bool, painted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in (terminal or {}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal is not None)
    assert Display.of(DemoOptions(plain=plain))._painted is painted
