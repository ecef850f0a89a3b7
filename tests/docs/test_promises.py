"""docs/promises.md and docs/security.md name the tests that hold what they say. What they name has to be there."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
PROMISES, SECURITY = ((DOCS / name).read_text() for name in ("promises.md", "security.md"))
NAME = re.compile(r"`(?!tests/)((?:[a-z0-9_]+/)+test_\w+\.py(?:::\w+)*)`")
NAMED = sorted(set(NAME.findall(PROMISES + SECURITY)))


def test_every_promise_and_failure_names_a_test() -> None:
    rows = [line for line in PROMISES.splitlines() if line.startswith("| ") and "---" not in line]
    without = [row for row in rows if "test_" not in row and not row.startswith(("| | ", "| failure"))]
    assert not without
    assert len(rows) > 60


def test_every_promise_says_which_test_shows_it_on_vllm_or_why_none_does() -> None:
    table = PROMISES.partition("\n## Promises\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines() if line[:1] == "|"]
    head, _, *promises = rows
    assert head[-1] == "on vLLM"
    assert [row[0] for row in promises] == [str(number) for number in range(1, 17)]
    for row in promises:
        assert len(row) == len(head), row[0]
        assert NAME.search(row[-1]) or row[-1].startswith("no engine has a part in it: "), row[0]


def is_quick(name: str) -> bool:
    """Whether `make test` or `make reliability` runs a test that is named, or one of a file that is."""
    file, *parts = name.split("::")
    return any(parts[-1] == test for test in quick(file)) if parts else bool(quick(file))


@cache
def quick(file: str) -> frozenset[str]:
    """The tests of a file that these two do not leave to other verbs, by their marks."""
    tree = ast.parse((TESTS / file).read_text())
    marked = [node.value for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)]
    if file.startswith(("browser/", "gpu/", "integration/plugin/")) or is_left(marked):
        return frozenset()
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return frozenset(
        each.name for each in functions if each.name.startswith("test_") and not is_left(each.decorator_list)
    )


def is_left(marks: list[ast.expr]) -> bool:
    """A parameter of a test may have such a mark: then the others are run."""
    named = {ast.unparse(each) for mark in marks for each in (mark.elts if isinstance(mark, ast.List) else [mark])}
    return bool(
        named
        & {
            "pytest.mark.thorough",
            "pytest.mark.sglang",
            "pytest.mark.vllm",
            "pytest.mark.trainers",
            "pytest.mark.stores",
        }
    )


WANT_A_REAL_ENGINE = [  # make sglang, make vllm
    "| an engine that dies between prepare and commit",
    "| a bad checkpoint that reaches a vLLM with refitd inside past the service's checks",
    "| a rank of a vLLM with refitd inside that alone fails, refuses, hangs or dies",
]


def test_make_test_or_make_reliability_runs_a_test_of_every_promise_and_failure() -> None:
    rows = [line for line in PROMISES.splitlines() if line.startswith("| ") and "test_" in line]
    left = [row.split(" | ")[0] for row in rows if not any(is_quick(name) for name in NAME.findall(row))]
    assert left == WANT_A_REAL_ENGINE


def test_everything_that_an_actor_may_not_do_names_a_test() -> None:
    model = SECURITY.partition("\n## Threat model\n")[2].partition("\n## ")[0]
    actors = model.split("\n### ")[1:]
    assert len(actors) == 8
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
