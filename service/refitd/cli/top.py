"""`refitd top`: the dashboard in a terminal."""

import sys
from contextlib import suppress
from dataclasses import replace
from typing import Annotated

import typer
from rich.live import Live

from refitd.cli.glance import Glance, screen
from refitd.cli.keys import Keys
from refitd.cli.options import Json, TokenFile, Url, connect
from refitd.cli.output import Output, speaking
from refitd_client.errors import ServiceError, UnauthorizedError
from refitd_client.http.client import RefitClient

Once = Annotated[bool, typer.Option("--once", help="Look once and end, as when stdout is no terminal")]
Interval = Annotated[float, typer.Option("--interval", metavar="SECONDS", min=0.1, help="Time between two looks")]

VERSIONS = 20
EVENTS = 30


def top(
    once: Once = False, interval: Interval = 1.0, url: Url = None, token_file: TokenFile = None, json: Json = False
) -> None:
    """Watch runs, engines, updates and decisions, live. The key q ends it.

    The first lines answer whether the engines are on the newest version, and if not, why not. Colours only repeat what
    words and letters say (NO_COLOR turns them off).

    \b
    refitd top
    refitd top --once
    refitd top --json | jq -r '.runs[].headline'
    """
    with speaking(json=json) as out, connect(url, token_file) as client:
        if json:
            out.show(client.overview())
        elif once or not sys.stdout.isatty():
            out.show(None, screen(look(client), width=out.console.width))
        else:
            _watch(client, out, interval)


def look(client: RefitClient) -> Glance:
    """Ask for everything that is shown."""
    return Glance(
        url=client.url,
        overview=client.overview(),
        versions=client.versions(limit=VERSIONS).items,
        events=client.log(limit=EVENTS).items,
    )


def _watch(client: RefitClient, out: Output, interval: float) -> None:
    glance = look(client)  # where nobody is there at all, that is the answer
    with (
        Live(screen=True, auto_refresh=False, console=out.console) as live,
        Keys() as keys,
        suppress(KeyboardInterrupt),
    ):
        while True:
            live.update(screen(glance, out.console.height, out.console.width), refresh=True)
            if keys.pressed("q", within=interval):
                return
            try:
                glance = look(client)
            except UnauthorizedError:
                raise
            except ServiceError as error:
                glance = replace(glance, lost=str(error))
