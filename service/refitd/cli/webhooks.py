"""`refitd webhooks`: what was told to whom, and what waits."""

from typing import Annotated

import typer

from refitd.cli import render
from refitd.cli.options import Json, TokenFile, Url, connect
from refitd.cli.output import speaking

Limit = Annotated[int, typer.Option("--limit", metavar="N", min=1, max=500, help="The newest N")]


def webhooks(limit: Limit = 20, url: Url = None, token_file: TokenFile = None, json: Json = False) -> None:
    """List webhooks: what was told, how far it is, and why a receiver has not taken it.

    \b
    refitd webhooks
    refitd webhooks --limit 100 --json
    """
    with speaking(json=json) as out, connect(url, token_file) as client:
        page = client.deliveries(limit=limit)
        out.show(page, render.deliveries_table(page.items))
