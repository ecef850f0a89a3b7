"""`refitd top`: `refitd status`, again and again."""

import sys
import time
from contextlib import suppress
from typing import Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from refitd.cli import render
from refitd.cli.options import calls_service
from refitd.cli.output import Output
from refitd.cli.status import VERSIONS, look, show_status
from refitd_client.errors import ServiceError, UnauthorizedError
from refitd_client.http.client import RefitClient

Once = Annotated[bool, typer.Option("--once", help="Look once and end, as when stdout is no terminal")]
Interval = Annotated[float, typer.Option("--interval", metavar="SECONDS", min=0.1, help="Time between two looks")]


@calls_service
def top(out: Output, client: RefitClient, once: Once = False, interval: Interval = 1.0) -> None:
    """Watch what 'refitd status' shows, live. Ctrl-C ends it.

    \b
    refitd top
    refitd top --json | jq -r '.runs[].headline'
    """
    if once or out.json or not sys.stdout.isatty():
        show_status(out, client, VERSIONS)
    else:
        _watch(out, client, interval)


def _watch(out: Output, client: RefitClient, interval: float) -> None:
    (_, lines), at, lost = look(out, client), time.gmtime(), ""  # a service that cannot be reached at first is an error
    with Live(screen=True, auto_refresh=False, console=out.console) as live, suppress(KeyboardInterrupt):
        while True:
            live.update(Group(_word(time.strftime("%H:%M:%S UTC", at), lost), *lines), refresh=True)
            time.sleep(interval)
            try:
                (_, lines), at, lost = look(out, client), time.gmtime(), ""
            except UnauthorizedError:
                raise
            except ServiceError as error:
                lost = str(error)


def _word(at: str, lost: str) -> Text:
    told = f"✕ not live since {at}: {lost}; trying again"
    return render.sentence(told, "bold red") if lost else Text(f"● live, {at}", "green")
