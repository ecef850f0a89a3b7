"""From a docstring to the text of --help: paragraphs flow to the terminal's width, examples keep their lines. Pure."""

from collections.abc import Callable
from inspect import getdoc

_KEEP_LINES = "\b"  # begins a paragraph whose lines stay as they are, as in every tool that Typer's parser knows


def help_of(command: Callable[..., object]) -> str:
    """The help text of a command."""
    paragraphs = (getdoc(command) or "").split("\n\n")
    return "\n\n".join(part if part.startswith(_KEEP_LINES) else " ".join(part.split()) for part in paragraphs)
