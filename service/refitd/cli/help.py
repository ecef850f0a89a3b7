"""How --help prints commands, and how they refuse what was typed.

In --help a docstring's paragraphs flow to the terminal's width, examples keep their lines, and switches show no type.
Nothing of a service's client is imported here: `refitd --help` answers at once.
"""

import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from inspect import getdoc
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from refitd.text import plain_refusal

_KEEP_LINES = "\b"  # begins a paragraph whose lines stay as they are, as in every tool that Typer's parser knows
EXIT_CODES_HELP = (
    "Exit codes: 0 done · 1 failed or refused · 2 wrong usage, or no --yes and no terminal to ask on · "
    "3 the service cannot be reached or is not ready · 4 not authorised · 5 timed out · 130 interrupted"
)


def help_of(command: Callable[..., object]) -> str:
    paragraphs = (getdoc(command) or "").split("\n\n")
    return "\n\n".join(part if part.startswith(_KEEP_LINES) else " ".join(part.split()) for part in paragraphs)


_NONE_OF = re.compile(r"'(.*)' is not (?:one of )?('.*')\.?")  # Typer's words for what is none of some values


def plainly(message: str) -> str:
    """Why a value is refused, in plain words, and with the value that was meant."""
    told = plain_refusal(message)
    if (none_of := _NONE_OF.fullmatch(told)) is None:
        return told
    typed, values = none_of.groups()
    meant = get_close_matches(typed.lower(), re.findall("'([^']+)'", values), 1)
    return f"{told.removesuffix('.')}. Did you mean {meant[0]!r}?" if meant else told


_BARE = frozenset({"--allow-missing"})
"""Options that may be written without a value, which is empty then."""


class Command(TyperCommand):
    """A command whose switches show no type, and whose refusals are plain sentences."""

    def parse_args(self, ctx: Any, args: Any) -> Any:
        """What was typed, by parameter."""
        typed = zip(args, [*args[1:], "-"], strict=False)
        args = [f"{each}=" if each in _BARE and after.startswith("-") else each for each, after in typed]
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = plainly(error.message)
            raise

    def get_params(self, ctx: Any) -> Any:
        return _switches_untyped(super().get_params(ctx))


class Group(TyperGroup):
    """A group whose switches show no type."""

    def get_params(self, ctx: Any) -> Any:
        return _switches_untyped(super().get_params(ctx))


def _switches_untyped(parameters: Sequence[Any]) -> Sequence[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = ""
    return parameters
