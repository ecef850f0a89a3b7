"""`refitd demo` only hands its options on: the demo itself has its own tests."""

from pathlib import Path

import pytest

from refitd_embedded.demo import STEPS, DemoOptions
from support.command_line import refitd


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[DemoOptions]:
    seen: list[DemoOptions] = []

    def main(options: DemoOptions) -> int:
        seen.append(options)
        return 1

    monkeypatch.setattr("refitd_embedded.demo.command.main", main)
    return seen


def test_options_are_handed_on_and_its_status_is_the_exit_code(calls: list[DemoOptions], tmp_path: Path) -> None:
    result = refitd("demo", "--steps", "3", "--seed", "7", "--no-publish", "--json", "--workdir", str(tmp_path))
    assert result.exit_code == 1
    assert calls == [DemoOptions(steps=3, seed=7, publish=False, workdir=tmp_path, json=True)]


def test_by_default_it_publishes_for_as_long_as_learning_takes(calls: list[DemoOptions]) -> None:
    refitd("demo")
    assert calls == [DemoOptions(steps=STEPS)]
