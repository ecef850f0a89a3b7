"""Options and arguments that several commands share, and the client that they lead to."""

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated

import typer

from refitd.cli.output import speaking
from refitd_client.http.client import RefitClient
from refitd_client.http.exchange import RetryPolicy

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
        help="File with the bearer token; else REFITD_TOKEN, REFITD_TOKEN_FILE, REFITD_READ_TOKEN_FILE",
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
