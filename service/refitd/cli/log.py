"""`refitd log`: what was decided and what happened, by run, version or engine, once or as it happens."""

import sys
import time
from contextlib import closing, suppress
from typing import Annotated

import msgspec
import typer

from refitd.cli.options import calls_service
from refitd.cli.output import Output
from refitd.cli.render import Table, event_line, when_exactly
from refitd.state.observer import LogFilter
from refitd.text import clean
from refitd_client.contract.states import LogSeverity
from refitd_client.contract.wire import Event, Page
from refitd_client.errors import ServiceUnreachableError
from refitd_client.http.client import RefitClient

_ASK_AGAIN_SECONDS = 1.0  # after which a service that went away is asked again
Subject = Annotated[str | None, typer.Argument(metavar="[ID]", help="Of one version or engine only, by its id")]
Limit = Annotated[int, typer.Option("--limit", metavar="N", min=1, max=500, help="The newest N")]
Before = Annotated[
    str | None, typer.Option("--before", metavar="WORD", help="Go on where a page ended: its next_cursor")
]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Then print what happens, as it happens; Ctrl-C ends it")]
OfRun = Annotated[str | None, typer.Option("--run", metavar="RUN", help="What concerns one run")]
OfEngine = Annotated[str | None, typer.Option("--engine", metavar="ID", help="What concerns one engine")]
AtLeast = Annotated[
    LogSeverity | None, typer.Option("--severity", metavar="info|warning", help="What is at least so grave")
]


@calls_service
def log(
    out: Output,
    client: RefitClient,
    subject: Subject = None,
    run: OfRun = None,
    engine: OfEngine = None,
    severity: AtLeast = None,
    follow: Follow = False,
    limit: Limit = 20,
    before: Before = None,
) -> None:
    """List the log of decisions, newest first: what became of versions, engines and updates, and why.

    A warning is what failed, was refused, or cannot be reached. With --follow the newest entry stands last, and what
    happens is added below; with --json each entry is then a line of its own. A service that restarts is waited for.

    \b
    refitd log
    refitd log exp~v000123
    refitd log --run exp --severity warning
    refitd log --follow --engine engine-0
    """
    wanted = LogFilter(run=run, engine=engine, severity=severity)
    if follow:
        if before is not None:
            raise ValueError("--follow begins with the newest entries: leave out --before")
        with suppress(KeyboardInterrupt):
            _follow(out, client, subject, wanted, limit)
        return
    page = _page(client, subject, wanted, before, limit)
    table = Table("WHEN", "ABOUT", words="WHAT")
    for event in page.items:
        table.add_row(when_exactly(event.at), clean(event.subject), words=clean(event.text))
    out.show(page, table)
    if page.next_cursor is not None and not out.json:
        out.remark(f"there are more: --limit N, or --before {page.next_cursor}", style="dim")


def _page(client: RefitClient, subject: str | None, wanted: LogFilter, before: str | None, limit: int) -> Page[Event]:
    """A page that is full unless it is the last: the service ends one early where few entries fit the filter."""
    found = list[Event]()
    while True:
        page = client.log(
            *(subject, before, limit - len(found)), run=wanted.run, engine=wanted.engine, severity=wanted.severity
        )
        found += page.items
        before = page.next_cursor
        if before is None or len(found) == limit:
            return Page(items=found, next_cursor=before)


def _follow(out: Output, client: RefitClient, subject: str | None, wanted: LogFilter, limit: int) -> None:
    newest = client.log(limit=1).items
    seen = newest[0].seq if newest else 0
    for event in reversed(_page(client, subject, wanted, None, limit).items):
        _print(out, event)
        seen = max(seen, event.seq)
    while True:
        try:
            with closing(client.events(str(seen))) as events:
                for event in events:
                    seen = event.seq
                    if wanted.fits(event) and subject in {None, event.subject}:
                        _print(out, event)
        except ServiceUnreachableError as error:
            out.remark(f"{error}; trying again", style="dim")
            time.sleep(_ASK_AGAIN_SECONDS)
        else:
            return  # the service says that there will be no more


def _print(out: Output, event: Event) -> None:
    if out.json:
        sys.stdout.write(msgspec.json.encode(event).decode() + "\n")
        sys.stdout.flush()
    else:
        out.show(None, event_line(event, when_exactly(event.at)))
