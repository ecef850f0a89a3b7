"""`refitd reclaim`: what would be deleted, and deleting it."""

import sys
from typing import Annotated

import typer

from refitd.cli import render
from refitd.cli.options import Json, TokenFile, Url, connect
from refitd.cli.output import Output, speaking
from refitd.cli.progress import bar, watched
from refitd_client.client import RefitClient
from refitd_client.contract.wire import ReclaimPlan

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted, what kept, and why")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask")]


def reclaim(
    dry_run: DryRun = False,
    yes: Yes = False,
    url: Url = None,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Delete versions that nobody needs, now rather than at the service's next look.

    Nothing goes that an engine serves, loads or may be brought back to, nor what is pinned: the plan names the reason.

    \b
    refitd reclaim --dry-run
    refitd reclaim --yes
    """
    with speaking(json=json) as out, connect(url, token_file) as client:
        if dry_run or not yes:
            plan = client.reclaim_plan()
            if dry_run:
                out.show(plan, render.reclaim_table(plan), render.reclaim_summary(plan))
                return
            _agree(out, plan)
        done = _carry_out(out, client)
        out.show(done, render.reclaim_table(done), render.reclaim_summary(done))


def _carry_out(out: Output, client: RefitClient) -> ReclaimPlan:
    """Have it done, and show how much is gone: the service counts what it holds while it deletes."""
    with bar(out, "deleting") as shown:
        if shown is None:
            return client.reclaim()
        goes, held = client.reclaim_plan().freed_bytes, client.overview().held_bytes
        shown.reach(0, goes)
        return watched(
            client.reclaim, lambda: shown.reach(min(goes, max(0, held - client.overview().held_bytes)), goes)
        )


def _agree(out: Output, plan: ReclaimPlan) -> None:
    """Ask whether to go on.

    Raises:
        ValueError: there is nobody to ask.
        typer.Abort: the answer was no.
    """
    if out.json or not _can_ask():
        raise ValueError("this deletes files and nobody can be asked: say --yes, or --dry-run to see what would go")
    out.show(plan, render.reclaim_table(plan), render.reclaim_summary(plan))
    typer.confirm("Delete them?", abort=True)


def _can_ask() -> bool:
    return sys.stdin.isatty()
