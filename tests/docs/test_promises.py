"""docs/promises.md and docs/security.md name the tests that hold what they say. What they name has to be there."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
PROMISES, SECURITY = ((DOCS / name).read_text() for name in ("promises.md", "security.md"))
NAMED = sorted(set(re.findall(r"`(?!tests/)((?:[a-z0-9_]+/)+test_\w+\.py(?:::\w+)*)`", PROMISES + SECURITY)))


def test_every_promise_and_failure_names_a_test() -> None:
    rows = [line for line in PROMISES.splitlines() if line.startswith("| ") and "---" not in line]
    without = [row for row in rows if "test_" not in row and not row.startswith(("| | ", "| failure"))]
    assert not without
    assert len(rows) > 60


def test_everything_that_an_actor_may_not_do_names_a_test() -> None:
    model = SECURITY.partition("\n## Threat model\n")[2].partition("\n## ")[0]
    actors = model.split("\n### ")[1:]
    assert len(actors) == 7
    for actor in actors:
        rows = [line for line in actor.splitlines() if line.startswith("| ") and not line.startswith("| May not")]
        assert rows, actor
        assert not [row for row in rows if "/test_" not in row]


@pytest.mark.parametrize("name", NAMED)
def test_a_test_that_a_page_names_exists(name: str) -> None:
    file, *parts = name.split("::")
    text = (TESTS / file).read_text()
    for part in parts:
        assert re.search(rf"^ *((async )?def|class) {part}\b", text, re.MULTILINE), f"no {part} in {file}"
