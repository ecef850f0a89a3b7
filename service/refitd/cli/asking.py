"""Whether something is meant that cannot be undone: a person is asked, a script says --yes."""

import sys

import typer
from rich.console import RenderableType

from refitd.cli.output import Output


def agree(out: Output, *shown: RenderableType, question: str, why: str) -> None:
    """Show what would be done and ask whether to go on. `why` is what a script hears, where nobody can be asked.

    Raises:
        ValueError: there is nobody to ask.
        typer.Abort: the answer was no.
    """
    if out.json or not can_ask():
        raise ValueError(why)
    for part in shown:
        out.console.print(part)
    typer.confirm(question, abort=True)


def can_ask() -> bool:
    """Whether stdin is a terminal."""
    return sys.stdin.isatty()
