"""Waiting for a version with a person watching: short looks, and a line that says what is waited for."""

import time
from collections.abc import Generator
from contextlib import suppress

from refitd.cli.output import Output
from refitd.cli.render import engines_on, sentence
from refitd_client.contract.naming import Order, version_id
from refitd_client.contract.states import VersionState, WaitOutcome
from refitd_client.contract.wire import Version, WaitResult
from refitd_client.errors import NotFoundError, VersionFailedError
from refitd_client.http.client import RefitClient
from refitd_client.http.routes import WaitFor

_LOOK = 1.0  # seconds between two looks, for the line to stay true
_FIND_PAUSE = 0.5  # seconds before a version that is not known yet is looked for again
_PAGE = 200
_PAST = frozenset({VersionState.REJECTED, VersionState.RETIRED, VersionState.DELETED, VersionState.LOST})


def wait_for(client: RefitClient, version_id: str, goal: WaitFor, seconds: float, out: Output) -> WaitResult:
    """Wait, and show how it gets on when somebody watches."""
    if not out.shows_progress:
        return client.wait(version_id, goal, seconds)
    ends = time.monotonic() + seconds
    with out.err.status(sentence(f"looking at {version_id}")) as line:
        while True:
            left = max(0.0, ends - time.monotonic())
            result = client.wait(version_id, goal, min(left, _LOOK))
            if result.outcome is not WaitOutcome.PENDING or left <= _LOOK:
                return result
            line.update(sentence(progress_of(result.version, left)))


def progress_of(version: Version, left: float) -> str:
    """What is waited for, in one line."""
    late = ", ".join(f"{engine.id} {engine.state}" for engine in version.engines if not engine.serves)
    waiting = f" · waiting for {late}" if late else ""
    return f"{version.id} {version.state} · engines {engines_on(version)}{waiting} · {left:.0f} s left"


def find_version(client: RefitClient, run: str, step: int, seconds: float) -> Version | None:
    """The version of a step, of the newest generation that has one. One that nobody has heard of yet is waited for.

    Raises:
        VersionFailedError: only older generations have one, and nothing will come of it any more.
    """
    ends = time.monotonic() + seconds
    found = look_for(client, run, step)
    while found is None and (left := ends - time.monotonic()) > 0:
        time.sleep(min(_FIND_PAUSE, left))
        found = _look_again(client, run, step)
    return found


def look_for(client: RefitClient, run: str, step: int) -> Version | None:
    """Look through all that the service knows, once. See `find_version`."""
    newest: int | None = None
    past: Version | None = None
    for version in _newest_first(client, run):
        newest = version.generation if newest is None else newest
        if version.step == step and (version.generation == newest or version.state not in _PAST):
            return version
        if version.step == step and past is None:
            past = version
    if past is not None:
        why = f": {past.reason}" if past.reason else ""
        raise VersionFailedError(f"step {step} of run {run} is known only as {past.id}: {past.state}{why}")
    return None


def _look_again(client: RefitClient, run: str, step: int) -> Version | None:
    """A trainer's next version is of the newest generation: one question is enough."""
    for newest in client.versions(run=run, limit=1).items:
        with suppress(NotFoundError):
            return client.version(version_id(run, Order(newest.generation, step)))
    return None


def _newest_first(client: RefitClient, run: str) -> Generator[Version]:
    cursor: str | None = None
    while True:
        page = client.versions(run=run, limit=_PAGE, cursor=cursor)
        yield from page.items
        cursor = page.next_cursor
        if cursor is None:
            return
