"""An HTTP server that answers as a test tells it to, and remembers what it was asked."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec

from refitd_client.contract.states import Kind, VersionState, WaitOutcome
from refitd_client.contract.wire import EngineOnVersion, Problem, Version, VersionPage, WaitResult
from support.scripted_server import Seen, answer, serve


@dataclass(frozen=True)
class Request:
    """What came in."""

    method: str
    path: str
    query: str
    authorization: str | None
    body: Any


Answer = tuple[int, Any]


@dataclass
class ScriptedService:
    """Listens on a port of its own. `answer` decides each reply, given all requests so far (the new one last).

    What it knows of a run is asked for before a publisher's first step: it knows `newest`, watches the root of the name
    `root`, and does not count that.
    """

    answer: Callable[[list[Request]], Answer]
    port: int = 0
    newest: Version | None = None
    root: str | None = None
    requests: list[Request] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._served = serve(self._step, port=self.port)
        self.port = urlsplit(self._served.__enter__().url).port or 0
        return self

    def __exit__(self, *raised: Any) -> None:
        self._served.__exit__(*raised)

    def _step(self, handler: Any) -> None:
        seen: Seen = handler.seen
        url, body = urlsplit(seen.path), json.loads(seen.body) if seen.body else None
        if (seen.method, url.path) == ("GET", "/v1/versions"):
            known = [] if self.newest is None else [self.newest]
            status, said = 200, VersionPage(items=known, root=self.root)
        else:
            self.requests.append(Request(seen.method, url.path, url.query, seen.headers.get("authorization"), body))
            status, said = self.answer(self.requests)
        answer(status, msgspec.json.encode(said))(handler)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"


def version(
    state: VersionState = VersionState.SEALED,
    engines: list[EngineOnVersion] | None = None,
    reason: str | None = None,
    barred: bool = False,
    digest: str | None = None,
) -> Version:
    """Version 1 of run `run`."""
    return Version(
        id="run~v000001",
        run="run",
        generation=1,
        step=1,
        kind=Kind.FULL,
        state=state,
        path="run/v000001",
        created_at="2026-11-21T12:00:00Z",
        engines=engines or [],
        reason=reason,
        barred=barred,
        digest=digest,
    )


def waited(outcome: WaitOutcome, **about: Any) -> Answer:
    """The answer of the long poll."""
    return 200, WaitResult(outcome=outcome, version=version(**about))


def problem(status: int, slug: str) -> Answer:
    """A problem document."""
    return status, Problem(type=f"urn:refitd:problem:{slug}", title=slug.capitalize(), status=status, detail="because")
