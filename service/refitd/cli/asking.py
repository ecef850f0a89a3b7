"""Asking a person before a command does what cannot be undone. A script passes --yes."""

import sys

import typer
from rich.console import RenderableType

from refitd.cli.output import Output


def agree(out: Output, *shown: RenderableType, question: str, does: str, say: str = "say --yes") -> None:
    """Show what would be done and ask whether to go on.

    Args:
        out: the output of the command.
        shown: what would be done, for people.
        question: what is asked.
        does: what would be done, in the words for a script that cannot be asked.
        say: the flags that such a script needs.

    Raises:
        ValueError: stdin is no terminal, or the answer is to be JSON.
        typer.Abort: the answer was no.
    """
    if out.json or not can_ask():
        why = "with --json nothing is asked" if out.json else "there is no terminal to ask on"
        raise ValueError(f"{does}; {why}: {say}")
    for part in shown:
        out.console.print(part)
    typer.confirm(question, abort=True)


def can_ask() -> bool:
    """Whether stdin is a terminal."""
    return sys.stdin.isatty()
