"""`refitd reclaim`: what would be deleted, and deleting it."""

from typing import Annotated

import typer

from refitd.cli import render
from refitd.cli.asking import agree
from refitd.cli.options import Json, TokenFile, Url, Yes, connect
from refitd.cli.output import Output, speaking
from refitd.cli.progress import bar, watched
from refitd_client.contract.wire import ReclaimPlan
from refitd_client.http.client import RefitClient

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted, what kept, and why")]
_SAY = "say --yes, or --dry-run to see what would go"


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
            shown = (render.reclaim_table(plan), render.reclaim_summary(plan))
            agree(out, *shown, question="Delete them?", does="this deletes files", say=_SAY)
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
