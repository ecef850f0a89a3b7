"""docs/promises.md names the tests that hold each promise. What it names has to be there."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "promises.md").read_text()
NAMED = sorted(set(re.findall(r"`([a-z0-9_]+/test_\w+\.py(?:::\w+)?)`", PAGE)))


def test_every_promise_and_failure_names_a_test() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and "---" not in line]
    without = [row for row in rows if "test_" not in row and not row.startswith(("| | ", "| failure"))]
    assert not without
    assert len(rows) > 60


@pytest.mark.parametrize("name", NAMED)
def test_a_test_that_the_page_names_exists(name: str) -> None:
    file, _, function = name.partition("::")
    text = (TESTS / file).read_text()
    assert not function or re.search(rf"^(async )?def {function}\(", text, re.MULTILINE), f"no {function} in {file}"
