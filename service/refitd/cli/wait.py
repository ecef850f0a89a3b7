"""`refitd wait`: wait until a version is served, and show on a terminal what is waited for."""

import time
from enum import StrEnum
from typing import Annotated

import typer

from refitd.cli import render
from refitd.cli.options import Json, Timeout, TokenFile, Url
from refitd.cli.output import PROMPT, Output, connect, failure_of, speaking
from refitd.cli.render import engines_on, sentence
from refitd.text import listed
from refitd_client.contract.naming import Order, version_id
from refitd_client.contract.states import WaitOutcome
from refitd_client.contract.wire import Version, WaitResult
from refitd_client.errors import NotFoundError, RefitError, WaitTimeoutError
from refitd_client.http.client import RefitClient
from refitd_client.http.exchange import RetryPolicy, judge
from refitd_client.http.routes import WaitFor

_WAIT_LOOK_SECONDS = 1.0  # seconds between two looks, for the line to stay true
_FIND_PAUSE = 0.5  # seconds before a version that is not known yet is looked for again
VersionIdOrNone = Annotated[str | None, typer.Argument(metavar="[ID]", help="A version's id; or else --run and --step")]
Run = Annotated[str | None, typer.Option("--run", metavar="RUN", envvar="REFITD_RUN", help="The version's run")]
Step = Annotated[int | None, typer.Option("--step", metavar="N", min=0, help="The version's step")]


class Goal(StrEnum):
    SERVED = "served"
    SEALED = "sealed"


For = Annotated[Goal, typer.Option("--for", help="Served by engines, or sealed: found good")]


def wait(
    version_id: VersionIdOrNone = None,
    run: Run = None,
    step: Step = None,
    goal: For = Goal.SERVED,
    timeout: Timeout = 120.0,  # a folder that stays half written is rejected after 60 s
    url: Url = None,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Wait until engines serve a version, or until it is clear that they will not.

    Ends with 0 when it is served, or when something newer took its place; with 1 when it failed; with 5 when the time
    is up, naming the engines that are late. With --json the answer is printed in each of these cases. A step that is
    not published yet, or not in the run's newest generation, is waited for as well.

    \b
    refitd wait exp~v000123
    refitd wait --run exp/trial --step 123 --timeout 300
    refitd wait --run exp/trial --step 123 --for sealed
    """
    with speaking(json=json) as out:
        ends = time.monotonic() + timeout
        if version_id is None:
            version_id = _find(connect(url, token_file), run, step, timeout)
        with connect(url, token_file, PROMPT.waiting(timeout)) as client:
            found = client.version(version_id)  # fails at once where there is no such version, or no service
            if goal is Goal.SERVED and not all(engine.serves for engine in found.engines):
                say_if_paused(out, client, found.run)
        with connect(url, token_file, RetryPolicy()) as client:
            result = wait_for(client, version_id, goal.value, max(0.0, ends - time.monotonic()), out)
        _tell(out, result, timeout)


def _find(client: RefitClient, run: str | None, step: int | None, timeout: float) -> str:
    """The id of a step in the run's newest generation; waits for one that is not published yet.

    Raises:
        WaitTimeoutError: it is not; the message has the ids of that step in older generations.
    """
    if run is None or step is None:
        raise ValueError("say which version: its id, or --run and --step")
    ends, why = time.monotonic() + timeout, ""
    with client:
        while True:
            for newest in client.versions(run=run, limit=1).items:
                try:
                    return client.version(version_id(run, Order(newest.generation, step))).id
                except NotFoundError as error:
                    why = f": {error.problem.detail}"
            if (left := ends - time.monotonic()) <= 0:
                raise WaitTimeoutError(f"after {timeout:g} s the service still knows no step {step} of run {run}{why}")
            time.sleep(min(_FIND_PAUSE, left))


def _tell(out: Output, result: WaitResult, timeout: float) -> None:
    try:
        judge(result, timeout)
    except RefitError as error:
        if not out.json:
            raise
        out.show(result)
        raise SystemExit(failure_of(error).code) from error
    out.show(result, render.outcome(result))


def wait_for(client: RefitClient, version_id: str, goal: WaitFor, seconds: float, out: Output) -> WaitResult:
    """Wait for a version; show the progress on a terminal."""
    if not out.shows_progress:
        return client.wait(version_id, goal, seconds)
    ends = time.monotonic() + seconds
    with out.err.status(sentence(f"looking at {version_id}")) as line:
        while True:
            left = max(0.0, ends - time.monotonic())
            result = client.wait(version_id, goal, min(left, _WAIT_LOOK_SECONDS))
            if result.outcome is not WaitOutcome.PENDING or left <= _WAIT_LOOK_SECONDS:
                return result
            line.update(sentence(progress_of(result.version, left)))


def say_if_paused(out: Output, client: RefitClient, run: str) -> None:
    """Say that no engine goes to a newer version, and what ends that; nothing while updates go on."""
    since = next((seen.paused_since for seen in client.overview().runs if seen.run == run), None)
    if since is not None:
        out.remark(
            f"updates of {run} are paused since {since}: no engine loads a newer version until 'refitd resume {run}'"
        )


def progress_of(version: Version, left: float) -> str:
    """What is waited for, in one line, and why the first engine that says so is late."""
    late = [engine for engine in version.engines if not engine.serves]
    waiting = f" · waiting for {listed([f'{engine.id} {engine.state}' for engine in late])}" if late else ""
    why = next((f" · {engine.id}: {engine.reason}" for engine in late if engine.reason), "")
    return f"{version.id} {version.state} · engines {engines_on(version)}{waiting} · {left:.0f} s left{why}"
