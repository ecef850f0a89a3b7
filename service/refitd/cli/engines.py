"""Commands about engines: list, add, move, remove, resync."""

from typing import Annotated

import typer

from refitd.cli import render
from refitd.cli.app import EXIT_CODES_HELP, Command, Group
from refitd.cli.options import EngineId, Json, TokenFile, Url, Yes, agree, calls_service
from refitd.cli.output import Output, connect, speaking
from refitd.cli.render import by_need
from refitd.clock import SystemClock
from refitd.text import listed
from refitd_client.contract.states import EngineGlance, EngineState
from refitd_client.contract.wire import NewEngine, Page, RunGlance
from refitd_client.errors import ConflictError
from refitd_client.http.client import RefitClient

app = typer.Typer(cls=Group, add_completion=False)

EngineUrl = Annotated[str, typer.Argument(metavar="URL", help="The engine's own URL, such as http://10.0.0.7:30000")]
NewId = Annotated[str | None, typer.Option("--id", metavar="ID", help="A name for it; else one is made from its URL")]
Run = Annotated[
    str | None, typer.Option("--run", metavar="RUN", help="The run to follow; needed where there are several")
]

EngineIds = Annotated[
    list[str], typer.Argument(metavar="ID…", help="Engines' ids or URLs: 'refitd engines' lists them")
]
OfRun = Annotated[str | None, typer.Option("--run", metavar="RUN", help="Only engines that follow this run")]
InState = Annotated[
    str | None,
    typer.Option(
        "--state",
        metavar="STATE",
        help="Only those that are troubled, away, updating or in sync, or in a finer state",
    ),
]
ToRun = Annotated[str, typer.Option("--run", metavar="RUN", help="The run to follow from now on")]


@app.callback(invoke_without_command=True)
def engines(
    context: typer.Context,
    state: InState = None,
    run: OfRun = None,
    url: Url = None,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """List engines, or change which there are. Those that need an operator come first.

    BEHIND counts the trainer's steps between what an engine serves and the newest good version of its run.

    \b
    refitd engines
    refitd engines --state troubled
    refitd engines add http://10.0.0.7:30000 --run exp/trial
    refitd engines move engine-0 engine-1 --run exp/next
    refitd engines resync engine-0
    """
    if context.invoked_subcommand is not None:
        return
    with speaking(json=json) as out, connect(url, token_file) as client:
        states = set(EngineState) if state is None else _states(state)
        chosen = [each for each in client.engines().items if each.state in states and run in {None, each.run}]
        if json:
            out.show(Page(items=chosen))
            return
        overview = client.overview()
        targets = {run.run: run.target for run in overview.runs}
        out.show(None, render.engines_table(by_need(chosen), targets, SystemClock().now()))
        if overview.faults.engines is not None:
            out.remark(overview.faults.engines)


def _states(word: str) -> set[EngineState]:
    plain = word.lower().replace("_", " ").replace("-", " ")
    meant = {state for state in EngineState if plain in {state.lower().replace("_", " "), state.glance}}
    if not meant:
        raise ValueError(f"--state {word!r} is none of {', '.join([*EngineGlance, *EngineState])}")
    return meant


@app.command(cls=Command, epilog=EXIT_CODES_HELP)
@calls_service
def add(out: Output, client: RefitClient, engine_url: EngineUrl, engine_id: NewId = None, run: Run = None) -> None:
    """Add an engine. It is brought to its run's newest good version at once."""
    engine = client.add_engine(NewEngine(url=engine_url, id=engine_id, run=run))
    out.show(engine, render.sentence(f"{engine.id} is added: 'refitd explain {engine.id}' shows its progress."))


@app.command(cls=Command, epilog=EXIT_CODES_HELP)
@calls_service
def move(out: Output, client: RefitClient, engine_ids: EngineIds, run: ToRun, yes: Yes = False) -> None:
    """Have engines follow another run.

    They go on serving what they serve until they have loaded the newest good version of that run, which need not have
    published yet. Where that run is closed it says so, and how to open it. This holds over restarts, until the engines
    file is changed to name a run for the engine. Asks before it takes engines from a run that is not closed.

    \b
    refitd engines move gpu-1:30000 gpu-2:30000 --run exp/tuesday
    """
    closed = next((seen for seen in client.overview().runs if seen.run == run and seen.closed_at is not None), None)
    try:
        page = client.move_engines(engine_ids, run, insist=yes)
    except ConflictError as error:
        if error.problem.slug != "run-open":
            raise
        detail, say = error.problem.detail, "say --yes if they are to be moved"
        agree(out, render.sentence(detail), question="Move them all the same?", does=detail, say=say)
        page = client.move_engines(engine_ids, run, insist=True)
    who, one = listed([engine.id for engine in page.items]), len(page.items) == 1
    out.show(page, render.sentence(f"{who} {'follows' if one else 'follow'} {run} from now on."))
    if closed is not None:
        out.remark(_what_closed_means(closed, who, one=one))


def _what_closed_means(run: RunGlance, who: str, *, one: bool) -> str:
    """Say what it means for engines that follow a closed run from now on, and what opens it."""
    if run.target is None:
        go, its = ("goes", "it serves") if one else ("go", "they serve")
        stays = f"It has no good version: until then {who} {go} on with what {its}."
    else:
        stays = f"Until then {who} {'is' if one else 'are'} brought to its newest good version, {run.target}."
    opens = f"the next version that is published there opens it, or 'refitd runs reopen {run.run}'"
    them = "it" if one else "them"
    taken = f"A trainer of another run can take {them} meanwhile (engines='mine')."
    return f"Run {run.run} is closed: {opens}. {stays} {taken}"


@app.command(cls=Command, epilog=EXIT_CODES_HELP)
@calls_service
def remove(out: Output, client: RefitClient, engine_id: EngineId) -> None:
    """Remove an engine. It keeps serving what it serves."""
    client.remove_engine(engine_id)
    out.show({"id": engine_id, "removed": True}, render.sentence(f"{engine_id} is removed."))


@app.command(cls=Command, epilog=EXIT_CODES_HELP)
@calls_service
def resync(out: Output, client: RefitClient, engine_id: EngineId) -> None:
    """Load an engine again, whatever it claims to serve: now, or when it is reachable. This ends a quarantine."""
    engine = client.resync(engine_id)
    when = " when it is reachable" if engine.state is EngineState.UNREACHABLE else ""
    out.show(
        engine,
        render.sentence(f"{engine.id} will be loaded{when}: 'refitd explain {engine.id}' shows its progress."),
    )
