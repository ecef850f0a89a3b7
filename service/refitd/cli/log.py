"""`refitd log`: what was decided and what happened, by version or engine."""

from typing import Annotated

import typer

from refitd.cli.options import calls_service
from refitd.cli.output import Output
from refitd.cli.render import when
from refitd.cli.table import Table
from refitd.text import clean
from refitd_client.http.client import RefitClient

Subject = Annotated[str | None, typer.Argument(metavar="[ID]", help="Of one version or engine only, by its id")]
Limit = Annotated[int, typer.Option("--limit", metavar="N", min=1, max=500, help="The newest N")]
Before = Annotated[
    str | None, typer.Option("--before", metavar="WORD", help="Go on where a page ended: its next_cursor")
]


@calls_service
def log(out: Output, client: RefitClient, subject: Subject = None, limit: Limit = 20, before: Before = None) -> None:
    """List the log of decisions, newest first: what became of versions, engines and rollouts, and why.

    \b
    refitd log
    refitd log exp~v000123
    refitd log engine-0 --limit 100 --json
    """
    page = client.log(subject, before, limit)
    table = Table("WHEN", "ABOUT", words="WHAT")
    for event in page.items:
        table.add_row(when(event.at), clean(event.subject), words=clean(event.text))
    out.show(page, table)
    if page.next_cursor is not None and not out.json:
        out.remark(f"there are more: --limit N, or --before {page.next_cursor}", style="dim")
