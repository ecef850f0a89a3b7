"""`refitd reclaim`: what would be deleted, and deleting it."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer
from rich.text import Text

from refitd.cli import render
from refitd.cli.output import OR_DRY_RUN, Json, Output, RunArgument, Yes, agree, bar, calls_service, speaking, watched
from refitd.cli.render import BAD, BUSY, GOOD, Table, cell, size
from refitd.text import listed
from refitd_client.bucket.collection import BucketCollection, collect_run
from refitd_client.bucket.objects import Bucket, is_bucket_url
from refitd_client.bucket.run import list_runs
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
    done = _carry_out(out, client)
    out.show(done, reclaim_table(done), reclaim_summary(done))


def _carry_out(out: Output, client: RefitClient) -> ReclaimPlan:
    """Have the service delete, and show its progress by the bytes that it still holds."""
    with bar(out, "deleting") as shown:
        if shown is None:
            return client.reclaim()
        goes, held = client.reclaim_plan().freed_bytes, client.overview().held_bytes
        shown(0, goes)
        return watched(client.reclaim, lambda: shown(min(goes, max(0, held - client.overview().held_bytes)), goes))


def reclaim_table(plan: ReclaimPlan) -> Table:
    """What goes and what stays, and why."""
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


Url = Annotated[str, typer.Argument(metavar="URL", help="The store: s3://bucket/prefix, gs://… or az://…")]
Runs = Annotated[
    list[str] | None, typer.Option("--run", metavar="RUN", help="A run, such as exp/trial (default: every run there)")
]
Keep = Annotated[
    int | None,
    typer.Option(
        "--keep",
        metavar="N",
        min=1,
        help="Also retire what is not among the N newest versions, pinned, wanted, or needed by one of these",
    ),
]


def collect(
    url: Url,
    runs: Runs = None,
    keep: Keep = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Delete from an object store what its publishers have retired, also when these are gone.

    A publisher collects by itself; this is for runs whose publisher has ended, from cron for instance. Nothing goes
    that counts, that a follower pulls or serves by its note, or that such a version stands on. A publisher that is
    alive goes on.

    \b
    refitd collect s3://bucket/weights --dry-run
    refitd collect s3://bucket/weights --run exp/trial --keep 1 --yes
    """
    with speaking(json=json) as out:
        if not is_bucket_url(url):
            raise ValueError(
                "an object store is named as s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"
            )
        bucket = Bucket.at(url)
        if dry_run or not yes:
            plan = asyncio.run(_collected(bucket, runs, keep, dry=True))
            if dry_run:
                out.show(plan, collection_table(plan, "delete"), _summary(plan, "would be deleted"))
                return
            shown = (collection_table(plan, "delete"), _summary(plan, "would be deleted"))
            agree(out, *shown, question="Delete them?", does="this deletes objects", say=OR_DRY_RUN)
        done = asyncio.run(_collected(bucket, runs, keep, dry=False))
        out.show(done, collection_table(done, "deleted"), _summary(done, "deleted"))


async def _collected(
    bucket: Bucket, runs: Sequence[str] | None, keep: int | None, *, dry: bool
) -> Mapping[str, BucketCollection]:
    known = await list_runs(bucket)
    if runs and (unknown := set(runs) - set(known)):
        raise ValueError(f"{bucket.name} has no run {min(unknown)!r}: it has {', '.join(known) or 'none'}")
    return {name: await collect_run(bucket, name, keep=keep, dry=dry) for name in runs or known}


def collection_table(done: Mapping[str, BucketCollection], verb: str) -> Table:
    """What goes and what stays, each with its reason."""
    table = Table("", "VERSION", words="WHY")
    for run in done.values():
        for version in run.deleted:
            table.add_row(Text(verb, style=BAD), cell(version), words=run.why.get(version))
        for version in run.retired:
            table.add_row(Text("retire", style=BUSY), cell(version), words=run.why.get(version))
        for version in run.waiting:
            table.add_row(Text("wait", style=GOOD), cell(version), words=run.why.get(version))
        for version in _kept(run):
            table.add_row(Text("keep", style=GOOD), cell(version), words=run.why.get(version))
    return table


def _kept(run: BucketCollection) -> list[str]:
    """Those that a collection leaves as they are, newest first: most of them count."""
    return sorted(run.why.keys() - {*run.deleted, *run.retired, *run.waiting}, reverse=True)


def _summary(done: Mapping[str, BucketCollection], verb: str) -> Text:
    deleted = sum(len(run.deleted) for run in done.values())
    later = sum(len(run.retired) + len(run.waiting) for run in done.values())
    kept = sum(len(_kept(run)) for run in done.values())
    versions, runs = "version" if deleted == 1 else "versions", "run" if len(done) == 1 else "runs"
    return Text(f"{deleted} {versions} {verb}, {later} later, {kept} kept, of {len(done)} {runs}", style="bold")


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
    """What a rollback does, in sentences for the question."""
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
