"""Options and arguments that several commands share, and the client that they lead to."""

from pathlib import Path
from typing import Annotated

import typer

from refitd_client.http.client import RefitClient
from refitd_client.http.retry import RetryPolicy

# A person who waits for an answer would rather hear at once that nobody is there.
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
VersionId = Annotated[
    str, typer.Argument(metavar="ID", help="A version's id, such as exp~v000123: 'refitd versions' lists them")
]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run, such as exp/trial")]
EngineId = Annotated[str, typer.Argument(metavar="ID", help="An engine's id: 'refitd engines' lists them")]
Timeout = Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=0.0, help="Longest time to wait")]


def connect(url: str | None, token_file: Path | None, retry: RetryPolicy = PROMPT) -> RefitClient:
    """The client that the options ask for.

    Raises:
        ValueError: the URL or the token cannot be one.
    """
    return RefitClient(url, token_file=token_file, retry=retry)
