"""`refitd reclaim`: what would be deleted, and deleting it."""

import re
from typing import Annotated

import typer
from rich.text import Text

from refitd.cli.options import Yes, calls_service
from refitd.cli.output import OR_DRY_RUN, Output, agree, bar, watched
from refitd.cli.render import BAD, GOOD, cell, size
from refitd.cli.table import Table
from refitd_client.contract.wire import ReclaimPlan
from refitd_client.http.client import RefitClient

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted, what kept, and why")]
_HASH = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{8,}\b")


@calls_service
def reclaim(out: Output, client: RefitClient, dry_run: DryRun = False, yes: Yes = False) -> None:
    """Delete versions that are not needed, now rather than at the service's next look.

    Nothing goes that an engine serves, loads or may be brought back to, nor what is pinned: the plan names the reason.

    \b
    refitd reclaim --dry-run
    refitd reclaim --yes
    """
    if dry_run or not yes:
        plan = client.reclaim_plan()
        if dry_run:
            out.show(plan, reclaim_table(plan), reclaim_summary(plan))
            return
        shown = (reclaim_table(plan), reclaim_summary(plan))
        agree(out, *shown, question="Delete them?", does="this deletes files", say=OR_DRY_RUN)
    done = _carry_out(out, client)
    out.show(done, reclaim_table(done), reclaim_summary(done))


def _carry_out(out: Output, client: RefitClient) -> ReclaimPlan:
    """Have the service delete, and show its progress by the bytes that it still holds."""
    with bar(out, "deleting") as shown:
        if shown is None:
            return client.reclaim()
        goes, held = client.reclaim_plan().freed_bytes, client.overview().held_bytes
        shown.reach(0, goes)
        return watched(
            client.reclaim, lambda: shown.reach(min(goes, max(0, held - client.overview().held_bytes)), goes)
        )


def reclaim_table(plan: ReclaimPlan) -> Table:
    """What goes and what stays, and why."""
    table = Table("", "PATH", "SIZE", right={"SIZE"}, words="WHY")
    verb = "deleted" if plan.done else "delete"
    for item in sorted(plan.items, key=lambda item: (item.keep, item.path)):
        word = Text("keep", style=GOOD) if item.keep else Text(verb, style=BAD)
        table.add_row(word, cell(_short(item.path)), size(item.bytes), words=cell("; ".join(item.reasons)))
    return table


def reclaim_summary(plan: ReclaimPlan) -> Text:
    """The plan in one line."""
    count = sum(not item.keep for item in plan.items)
    kept = len(plan.items) - count
    would = "freed" if plan.done else "would be freed"
    text = f"{size(plan.freed_bytes)} {would}: {count} to delete, {kept} to keep, {size(plan.kept_bytes)}"
    if plan.disk_budget is not None:
        text += f" of a disk budget of {size(plan.disk_budget)}"
    if plan.foreign_bytes:
        text += f"; {size(plan.foreign_bytes)} are not refitd's to delete"
    return Text(text, style="bold")


def _short(path: str) -> str:
    """A path without the tails of its long hexadecimal names, which only machines read: JSON has the whole."""
    return _HASH.sub(r"\1…", path)
