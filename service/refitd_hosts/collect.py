"""`refitd collect` deletes from an object store what nothing needs."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer
from rich.text import Text

from refitd.cli.options import OR_DRY_RUN, Json, Yes, agree
from refitd.cli.output import speaking
from refitd.cli.reclaim import DryRun
from refitd.cli.render import BAD, BUSY, GOOD, Table, cell
from refitd_client.bucket.collection import BucketCollection, collect_run
from refitd_client.bucket.objects import Bucket
from refitd_client.bucket.run import list_runs
from refitd_client.contract.stores import is_bucket_url

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
    """What goes, and what stays with its reason."""
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
