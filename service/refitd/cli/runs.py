"""Commands about runs: list, close, reopen, delete."""

import typer

from refitd.cli import render
from refitd.cli.app import EXIT_CODES_HELP, Command, Group
from refitd.cli.options import Json, RunArgument, TokenFile, Url, Yes, agree, calls_service
from refitd.cli.output import Output, connect, speaking
from refitd.cli.render import Table
from refitd.text import clean
from refitd_client.contract.states import Standing
from refitd_client.contract.wire import Page, RunGlance
from refitd_client.http.client import RefitClient

app = typer.Typer(cls=Group, add_completion=False)

_WHAT_GOES = "Its other versions are deleted at the next collection: 'refitd reclaim --dry-run' lists them."


@app.callback(invoke_without_command=True)
def runs(context: typer.Context, url: Url = None, token_file: TokenFile = None, json: Json = False) -> None:
    """List runs, or say which have ended: the status of each, its target, and how many engines follow it.

    Closed ones come last.

    \b
    refitd runs
    refitd runs close exp/monday
    """
    if context.invoked_subcommand is not None:
        return
    with speaking(json=json) as out, connect(url, token_file) as client:
        page = Page(items=client.overview().runs)
        numbers = ("TARGET", "NEWEST", "ENGINES")
        table = Table("RUN", "STANDS", *numbers, right=numbers, words="WHY")
        for run in page.items:
            # Of a run that no engine follows also the remedy, of one in trouble the reason.
            more = run.reasons[:1] if run.standing is Standing.UNFOLLOWED else [run.trouble or ""]
            table.add_row(
                render.sentence(run.run),
                render.shown_standing(run.standing),
                *(render.NOTHING if step is None else f"{step:,}" for step in (run.target_step, run.newest_step)),
                f"{run.in_sync}/{sum(run.engines.values())}",
                words=render.sentence(" ".join([run.headline, *more]).rstrip()),
            )
        out.show(page, table if page.items else render.sentence("No runs.", "dim"))


@app.command(cls=Command, epilog=EXIT_CODES_HELP)
@calls_service
def close(out: Output, client: RefitClient, run: RunArgument, yes: Yes = False) -> None:
    """Say that a run has ended.

    It wants no engines any more, and nothing is wrong with it. Engines that follow it go on with what they serve, and
    are free for another run. Collection keeps its newest good version, what engines need, what is pinned and every Nth
    (--keep-every), and deletes the rest, those that are UNKNOWN as well, but for one that is newer than the newest good
    one. 'refitd reclaim' does it at once. The next version that is published opens it again. A host that follows
    refuses it until the run has ended at the hub.

    \b
    refitd runs close exp/monday
    """
    if not yes:
        goes = (
            f"Of {run} the newest good version is kept, with what engines need and what is pinned, and one without a "
            "verdict if it is newer. Collection deletes the others. The next version that is published opens it again."
        )
        loses = "this lets collection delete older versions of the run"
        agree(out, render.sentence(goes), question="Close it?", does=loses)
    seen = client.close_run(run)
    out.show(seen, render.sentence(f"{run} is closed. {_free(seen)} {_WHAT_GOES}"))


@app.command(cls=Command, epilog=EXIT_CODES_HELP)
@calls_service
def reopen(out: Output, client: RefitClient, run: RunArgument) -> None:
    """Take back that a run has ended. What was deleted meanwhile stays deleted."""
    seen = client.reopen_run(run)
    out.show(seen, render.sentence(f"{run} is open. {seen.headline}"))


@app.command(cls=Command, epilog=EXIT_CODES_HELP)
@calls_service
def delete(out: Output, client: RefitClient, run: RunArgument, yes: Yes = False) -> None:
    """Delete a run with all its versions, for good.

    Asks for the run's name, unless --yes is given. It is refused while a publisher that is alive holds the run, while
    an engine follows it or serves a version of it, and while a version is pinned. What refitd cannot prove to be a
    version's stays, and so does what lies in an object store. The next version that is published under this name begins
    a new generation. A host that follows refuses it until the run has ended at the hub.

    \b
    refitd runs delete exp/monday
    """
    if not yes:
        goes, does = f"All versions of {run} are deleted, for good.", "this deletes all versions of the run, for good"
        agree(out, render.sentence(goes), question=f"Type {clean(run)} to go on", does=does, name=run)
    seen = client.delete_run(run)
    versions = "1 version goes" if seen.versions == 1 else f"{seen.versions} versions go"
    out.show(seen, render.sentence(f"{run} is deleted. {versions}; the files go in the background."))


def _free(seen: RunGlance) -> str:
    count = sum(seen.engines.values())
    if count == 0:
        return "No engine follows it."
    goes = "1 engine goes on with what it serves" if count == 1 else f"{count} engines go on with what they serve"
    return f"{goes}: 'refitd engines move ID --run RUN' brings engines to another run."
