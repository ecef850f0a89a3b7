"""From texts to Markdown. Pure."""

import re
from collections.abc import Iterable, Sequence

_MARKS = re.compile(r"([\\`*<|])|(?<![A-Za-z0-9])(_)|(_)(?![A-Za-z0-9])")


def plain(text: str) -> str:
    """A text whose characters mean themselves, in a table as well."""
    return _escaped(" ".join(text.split()))


def _escaped(text: str) -> str:
    return _MARKS.sub(r"\\\g<0>", text)


def prose(text: str) -> str:
    """A docstring's text on one line: what it says between backticks stays code."""
    parts = " ".join(text.split()).split("`")
    return "`".join(part.replace("|", "\\|") if at % 2 else _escaped(part) for at, part in enumerate(parts))


def code(text: str) -> str:
    """A piece of code, in a table as well."""
    return "`" + text.replace("|", "\\|") + "`"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; its cells are Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def page(*parts: str) -> str:
    """Parts of a page, an empty line between them, with one line's end at its end."""
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"
