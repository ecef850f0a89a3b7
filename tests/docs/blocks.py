"""The fenced blocks of the pages, and what a page says about them in the comment right above.

<!-- not run: WHY -->      the tests only look at it
<!-- saved as FILE -->     it is the content of a file that later blocks use
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TREE = Path(__file__).parents[2]
PAGES = (TREE / "README.md", TREE / "examples/README.md", *sorted((TREE / "docs").rglob("*.md")))
SHELL = frozenset({"sh", "bash", "console"})
EXECUTABLE = SHELL | {"python"}

_FENCE = re.compile(r"^(?P<fence>```+)(?P<language>[\w-]*)\n(?P<text>.*?)^(?P=fence)$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!-- (not run: |saved as )(.+?) -->\n\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block: where it is, what is in it, why it is not run and which file it is, if it is one."""

    page: Path
    line: int
    language: str
    text: str
    not_run: str | None
    saved_as: str | None

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def name_of(page: Path) -> str:
    """A page's path in the repository."""
    return str(page.relative_to(TREE))


def blocks_of(page: Path) -> Iterator[Block]:
    """The blocks of a page, in their order."""
    text = page.read_text()
    for found in _FENCE.finditer(text):
        said = _COMMENT.search(text, 0, found.start())
        kind, value = (said[1], said[2]) if said else ("", "")
        yield Block(
            page=page,
            line=text.count("\n", 0, found.start()) + 1,
            language=found["language"],
            text=found["text"],
            not_run=value if kind.startswith("not run") else None,
            saved_as=value if kind.startswith("saved") else None,
        )


def lines_of(block: Block) -> Iterator[str]:
    """The commands of a shell block, each on one line; of a console block those behind a prompt."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if block.language != "console":
            yield line
        elif line.startswith("$ "):
            yield line.removeprefix("$ ")
