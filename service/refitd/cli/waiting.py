"""Waiting for a version with a person watching: short looks, and a line that says what is waited for."""

import time
from collections.abc import Generator

from refitd.cli.output import Output
from refitd.cli.render import engines_on, sentence
from refitd_client.client import RefitClient
from refitd_client.contract.states import WaitOutcome
from refitd_client.contract.wire import Version, WaitResult
from refitd_client.routes import WaitFor

_LOOK = 1.0  # seconds between two looks, for the line to stay true
_FIND_PAUSE = 0.5  # seconds before a version that is not known yet is looked for again
_PAGE = 200


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
    late = ", ".join(f"{engine.id} {engine.state}" for engine in version.engines if engine.step != version.step)
    waiting = f" · waiting for {late}" if late else ""
    return f"{version.id} {version.state} · engines {engines_on(version)}{waiting} · {left:.0f} s left"


def find_version(client: RefitClient, run: str, step: int, seconds: float) -> Version | None:
    """The version of a step in the run's newest generation. One that nobody has heard of yet is looked for again."""
    ends = time.monotonic() + seconds
    while True:
        found = look_for(client, run, step)
        left = ends - time.monotonic()
        if found is not None or left <= 0:
            return found
        time.sleep(min(_FIND_PAUSE, left))


def look_for(client: RefitClient, run: str, step: int) -> Version | None:
    """Look once. Lists are newest first, so the first version that is older ends the search."""
    newest: int | None = None
    for version in _newest_first(client, run):
        newest = version.generation if newest is None else newest
        if version.generation < newest or version.step < step:
            return None
        if version.step == step:
            return version
    return None


def _newest_first(client: RefitClient, run: str) -> Generator[Version]:
    cursor: str | None = None
    while True:
        page = client.versions(run=run, limit=_PAGE, cursor=cursor)
        yield from page.items
        cursor = page.next_cursor
        if cursor is None:
            return
