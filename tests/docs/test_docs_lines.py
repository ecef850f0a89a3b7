"""Lines of the pages can be read in an editor and in a diff: none of their prose or commands is longer than the code's.

What is no prose keeps its length: a table's row, what a terminal showed, and what a file holds. The pages of
docs/reference are written by a program.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from blocks import PAGES, TREE, name_of

LONGEST = 120
SHOWN = ("```console", "```json", "```text")
WRITTEN = [page for page in (*PAGES, TREE / "CONTRIBUTING.md") if page.parent.name != "reference"]


def own_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines of prose and of commands, with their numbers."""
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        begins = line.lstrip().startswith("```")
        if begins:
            fence = "" if fence else line.strip()
        elif not fence.startswith(SHOWN) and not line.lstrip().startswith("|"):
            yield number, line


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_no_line_of_prose_or_of_a_command_is_longer_than_a_line_of_code(page: Path) -> None:
    long = [f"line {number}: {len(line)}" for number, line in own_lines(page.read_text()) if len(line) > LONGEST]
    assert long == []
