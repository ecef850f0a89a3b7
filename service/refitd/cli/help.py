"""What --help says: a docstring's paragraphs flow to the terminal's width, examples keep their lines, and switches show
no type, for they take no value.
"""

from collections.abc import Callable, Sequence
from inspect import getdoc
from typing import Any

from typer.core import TyperCommand, TyperGroup

_KEEP_LINES = "\b"  # begins a paragraph whose lines stay as they are, as in every tool that Typer's parser knows


def help_of(command: Callable[..., object]) -> str:
    """The help text of a command."""
    paragraphs = (getdoc(command) or "").split("\n\n")
    return "\n\n".join(part if part.startswith(_KEEP_LINES) else " ".join(part.split()) for part in paragraphs)


class Command(TyperCommand):
    """A command whose switches show no type."""

    def get_params(self, ctx: Any) -> Any:
        """Its parameters, with --help."""
        return _switches_untyped(super().get_params(ctx))


class Group(TyperGroup):
    """A group whose switches show no type."""

    def get_params(self, ctx: Any) -> Any:
        """Its parameters, with --help."""
        return _switches_untyped(super().get_params(ctx))


def _switches_untyped(parameters: Sequence[Any]) -> Sequence[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = ""
    return parameters
