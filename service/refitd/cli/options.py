"""Options and questions that commands share.

Before a command does what cannot be undone it asks; a script passes --yes.
"""

import sys
from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from refitd.cli.output import Output, connect, speaking

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
        help="File with the bearer token; else REFITD_TOKEN, REFITD_TOKEN_FILE, REFITD_READ_TOKEN_FILE",
        rich_help_panel=_SERVICE,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout: the answer, or a problem")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run, such as exp/trial")]
EngineId = Annotated[str, typer.Argument(metavar="ID", help="An engine's id: 'refitd engines' lists them")]
Timeout = Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=0.0, help="Longest time to wait")]


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


OR_DRY_RUN = "say --yes, or --dry-run to see what would go"


def agree(
    out: Output, *shown: RenderableType, question: str, does: str, say: str = "say --yes", name: str | None = None
) -> None:
    """Show what would be done and ask whether to go on.

    Args:
        shown: what would be done, for people.
        does: what would be done, in the words for a script that cannot be asked.
        say: the flags that such a script needs.
        name: what has to be typed where it cannot be taken back; else yes or no is the answer.

    Raises:
        ValueError: stdin is no terminal, or the answer is to be JSON.
        typer.Abort: the answer was no, or another name.
    """
    if out.json or not can_ask():
        why = "with --json nothing is asked" if out.json else "there is no terminal to ask on"
        raise ValueError(f"{does}; {why}: {say}")
    for part in shown:
        out.console.print(part)
    if name is None:
        typer.confirm(question, abort=True)
    elif typer.prompt(question, default="", show_default=False).strip() != name:
        raise typer.Abort


def can_ask() -> bool:
    return sys.stdin.isatty()
