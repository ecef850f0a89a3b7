"""`refitd wait`: block until a version is served."""

import time
from enum import StrEnum
from typing import Annotated

import typer

from refitd.cli import render
from refitd.cli.exits import failure_of
from refitd.cli.options import PROMPT, Json, Timeout, TokenFile, Url, connect
from refitd.cli.output import Output, speaking
from refitd.cli.waiting import find_version, wait_for
from refitd_client.contract.wire import WaitResult
from refitd_client.errors import RefitError, WaitTimeoutError
from refitd_client.http.client import RefitClient
from refitd_client.http.retry import RetryPolicy
from refitd_client.http.verdict import judge

VersionIdOrNone = Annotated[str | None, typer.Argument(metavar="[ID]", help="A version's id; or else --run and --step")]
Run = Annotated[str | None, typer.Option("--run", metavar="RUN", envvar="REFITD_RUN", help="The version's run")]
Step = Annotated[int | None, typer.Option("--step", metavar="N", min=0, help="The version's step")]


class Goal(StrEnum):
    """What to wait for."""

    SERVED = "served"
    SEALED = "sealed"


For = Annotated[Goal, typer.Option("--for", help="Served by engines, or sealed: found good")]


def wait(
    version_id: VersionIdOrNone = None,
    run: Run = None,
    step: Step = None,
    goal: For = Goal.SERVED,
    timeout: Timeout = 60.0,
    url: Url = None,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Wait until engines serve a version, or until it is clear that they will not.

    Ends with 0 when it is served, or when something newer took its place; with 1 when it failed; with 5 when the time
    is up, naming the engines that are late. With --json the answer is printed in each of these cases. A step that
    nobody has published yet is waited for as well; one that only an older generation of the run has is not, where it
    was rejected, lost or deleted there.

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
            client.version(version_id)  # fails at once where there is no such version, or no service
        with connect(url, token_file, RetryPolicy()) as client:
            result = wait_for(client, version_id, goal.value, max(0.0, ends - time.monotonic()), out)
        _tell(out, result, timeout)


def _find(client: RefitClient, run: str | None, step: int | None, timeout: float) -> str:
    if run is None or step is None:
        raise ValueError("say which version: its id, or --run and --step")
    with client:
        version = find_version(client, run, step, timeout)
    if version is None:
        raise WaitTimeoutError(f"after {timeout:g} s the service still knows no step {step} of run {run}")
    return version.id


def _tell(out: Output, result: WaitResult, timeout: float) -> None:
    try:
        judge(result, timeout)
    except RefitError as error:
        if not out.json:
            raise
        out.show(result)
        raise typer.Exit(failure_of(error).code) from error
    out.show(result, render.outcome(result))
