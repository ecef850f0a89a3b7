"""Options and arguments that several commands share, the client that they lead to, and how --help prints them.

In --help a docstring's paragraphs flow to the terminal's width, examples keep their lines, and switches show no type.
"""

import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, Signature, getdoc, signature
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from refitd.cli.output import speaking
from refitd.text import plain_refusal
from refitd_client.http.client import RefitClient
from refitd_client.http.exchange import RetryPolicy

_KEEP_LINES = "\b"  # begins a paragraph whose lines stay as they are, as in every tool that Typer's parser knows
# At a prompt, a service that does not answer is reported soon.
PROMPT = RetryPolicy(deadline=2.0)
_SERVICE = "The service"
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="Where the service is; else REFITD_URL, else http://127.0.0.1:8700",
        rich_help_panel=_SERVICE,
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="File with the bearer token; else REFITD_TOKEN, REFITD_TOKEN_FILE, REFITD_READ_TOKEN(_FILE)",
        rich_help_panel=_SERVICE,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout: the answer, or a problem")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run, such as exp/trial")]
EngineId = Annotated[str, typer.Argument(metavar="ID", help="An engine's id: 'refitd engines' lists them")]
Timeout = Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=0.0, help="Longest time to wait")]


def connect(url: str | None, token_file: Path | None, retry: RetryPolicy = PROMPT) -> RefitClient:
    """The client that the options ask for.

    Raises:
        ValueError: the URL or the token cannot be one.
    """
    return RefitClient(url, token_file=token_file, retry=retry)


def calls_service(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command --url, --token-file and --json, and call it with its output and a client of the service.

    The command takes `out` and `client` first, then its own parameters.
    """

    @wraps(command)
    def run(*, url: str | None = None, token_file: Path | None = None, json: bool = False, **given: object) -> None:
        with speaking(json=json) as out, connect(url, token_file) as client:
            command(out, client, **given)

    _, _, *own = signature(command).parameters.values()
    shared = [("url", Url, None), ("token_file", TokenFile, None), ("json", Json, False)]
    added = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, annotation, default in shared
    ]
    # Typer reads the options from the signature.
    run.__signature__ = Signature([*own, *added])  # pyright: ignore[reportAttributeAccessIssue]
    return run


def help_of(command: Callable[..., object]) -> str:
    """The help text of a command."""
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
