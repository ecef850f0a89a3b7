"""`refitd reclaim`: what would be deleted, and deleting it."""

import re
from contextlib import nullcontext
from typing import Annotated

import typer
from rich.text import Text

from refitd.cli import render
from refitd.cli.options import OR_DRY_RUN, RunArgument, Yes, agree, calls_service
from refitd.cli.output import Output
from refitd.cli.render import BAD, GOOD, Table, cell, size
from refitd.text import listed
from refitd_client.contract.wire import ReclaimPlan, RollbackPlan
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
    with out.err.status("deleting") if out.shows_progress else nullcontext():
        done = client.reclaim()
    out.show(done, reclaim_table(done), reclaim_summary(done))


def reclaim_table(plan: ReclaimPlan) -> Table:
    table = Table("", "PATH", "SIZE", right={"SIZE"}, words="WHY")
    verb = "deleted" if plan.done else "delete"
    for item in sorted(plan.items, key=lambda item: (item.keep, item.path)):
        word = Text("keep", style=GOOD) if item.keep else Text(verb, style=BAD)
        table.add_row(word, cell(_short(item.path)), size(item.bytes), words=cell("; ".join(item.reasons)))
    return table


def reclaim_summary(plan: ReclaimPlan) -> Text:
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


To = Annotated[
    str | None,
    typer.Option(
        "--to", metavar="ID", help="The version to go to, or its step; else the last good one before the current"
    ),
]
_BARS = "this bars versions for good"
_OR_TO = "say --yes, and --to ID to be sure where it goes"


@calls_service
def rollback(out: Output, client: RefitClient, run: RunArgument, to: To = None, yes: Yes = False) -> None:
    """Bring a run's engines back to an earlier good version.

    Says first from which version to which it goes, and asks. Said again, it goes back one more. What is newer is barred
    for good, and collection deletes its files, but for what is pinned and the newest on disk. The way forward is to
    publish anew: the trainer's next step is loaded as usual, and so is the same step in a new generation: begun with
    'refitd publish --new-generation', or by a publisher of the SDK that is opened anew. A host that follows refuses it:
    say it to the hub.

    \b
    refitd rollback exp/trial
    refitd rollback exp/trial --to 120
    refitd rollback exp/trial --to exp~trial~v000120 --yes
    """
    plan = client.rollback_plan(run, to)
    if not yes:
        shown = (render.sentence(told) for told in what_it_does(plan))
        agree(out, *shown, question="Roll back?", does=_BARS, say=_OR_TO)
    version = client.rollback(run, plan.goal)  # not one further back, even if another rollback came first
    did = f"{plan.run} rolls back to {version.id} (step {version.step}). What is newer is barred for good."
    out.show(version, *(render.sentence(told) for told in [did, *_unknown(plan), *_later(plan)]))


def what_it_does(plan: RollbackPlan) -> list[str]:
    way = f"{plan.run} goes from {plan.leaves} back to {plan.goal}."
    if not plan.barred:
        nothing = "" if plan.unknown else " Nothing newer is left to bar."
        return [f"{way}{nothing}", *_unknown(plan), *_later(plan)]
    whose = "its" if len(plan.barred) == 1 else "their"
    return [
        way,
        f"Barred for good: {listed(plan.barred)}. No engine goes there again, and collection deletes {whose} files, "
        "but for what is pinned and the newest on disk.",
        "To go forward again, publish anew: the next step, or the same one with 'refitd publish --new-generation' "
        "(in the SDK: by a publisher that is opened anew).",
        *_unknown(plan),
        *_later(plan),
    ]


def _unknown(plan: RollbackPlan) -> list[str]:
    """What hosts have that the service has forgotten, or never knew."""
    if not plan.unknown:
        return []
    return [f"Hosts have {listed(plan.unknown)}, which this service does not know: they go back from there too."]


def _later(plan: RollbackPlan) -> list[str]:
    """Engines that cannot be reached now, which roll back when they are back."""
    if not plan.unreachable:
        return []
    one = len(plan.unreachable) == 1
    verb, later = ("is", "it follows when it is back") if one else ("are", "they follow when they are back")
    return [f"{listed(plan.unreachable)} {verb} UNREACHABLE: {later}."]
