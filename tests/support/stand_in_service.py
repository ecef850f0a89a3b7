"""A service that says what a test wants it to say, on a real port, in the contract's own types.

It stands in for refitd because the command line has to be shown states that the real service cannot be brought to at
will: a quarantined engine, a version rejected in the middle of a wait, a journal that is full. The real service and the
real command line meet in the end-to-end tests.
"""

import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response

from refitd.api.log import encode
from refitd_client.contract.naming import Order, version_id
from refitd_client.contract.plugin import Receiver, Receivers
from refitd_client.contract.states import EngineState, Kind, Standing, UpdateState, VersionState, WaitOutcome
from refitd_client.contract.wire import (
    DeletedRun,
    Engine,
    EngineOnVersion,
    Event,
    Explanation,
    Faults,
    Move,
    NewEngine,
    Notice,
    Overview,
    Page,
    Problem,
    ReclaimPlan,
    Rollback,
    RollbackPlan,
    RunChange,
    RunGlance,
    Version,
    VersionPage,
    WaitResult,
)
from refitd_client.transport.memory import boot_id, host_name


def make_version(step: int, *, run: str = "exp", generation: int = 1, **fields: Any) -> Version:
    """A good version; a test says only what it is about."""
    defaults: dict[str, Any] = {
        "id": version_id(run, Order(generation, step)),
        "kind": Kind.FULL,
        "state": VersionState.SEALED,
        "path": f"{run}/v{step:06d}",
        "created_at": "2026-11-21T12:00:00Z",
        "bytes": 3_087_467_144,
    }
    return Version(run=run, generation=generation, step=step, **{**defaults, **fields})


def make_engine(engine_id: str = "engine-0", **fields: Any) -> Engine:
    """An engine of run `exp` in sync at step 2."""
    step = fields.get("step", 2)
    defaults: dict[str, Any] = {
        "url": "http://127.0.0.1:30000",
        "state": EngineState.IN_SYNC,
        "run": "exp",
        "version": None if step is None else version_id("exp", Order(1, step)),
        "step": step,
    }
    return Engine(id=engine_id, **{**defaults, **fields})


def on_version(engine: Engine, version: str = "exp~v000002") -> EngineOnVersion:
    """The engine as a version lists it."""
    serves = engine.known and engine.version == version
    return EngineOnVersion(
        id=engine.id,
        state=engine.state,
        step=engine.step,
        reason=engine.reason,
        serves=serves,
        version=engine.version if engine.known else None,
    )


def make_run(**fields: Any) -> RunGlance:
    """A run whose engines are all on its newest version."""
    defaults: dict[str, Any] = {
        "run": "exp",
        "standing": Standing.CURRENT,
        "headline": "All 2 engines serve step 2, the newest.",
        "reasons": [],
        "target": "exp~v000002",
        "target_step": 2,
        "newest": "exp~v000002",
        "newest_step": 2,
        "update": UpdateState.COMPLETE,
        "paused_since": None,
        "engines": {EngineState.IN_SYNC: 2},
        "in_sync": 2,
    }
    return RunGlance(**(defaults | fields))


def make_overview(state: "StandIn") -> Overview:
    """What the service says of everything."""
    return Overview(
        at="2026-11-21T12:00:00.123Z",
        event=len(state.events),
        strategy="all",
        faults=state.faults,
        runs=state.runs or state.derived_runs(),
        engines=state.engines,
        versions=dict(Counter(version.state for version in state.versions)),
        held_bytes=sum(version.bytes or 0 for version in state.versions),
    )


class _ProblemError(Exception):
    def __init__(self, status: int, slug: str, detail: str) -> None:
        super().__init__(detail)
        self.problem = Problem(type=f"urn:refitd:problem:{slug}", title="No", status=status, detail=detail)


@dataclass(slots=True)
class StandIn:
    """What the service says. `outcomes` answer waits, in order, the last one for ever; `asked` is the log.

    `root` is the name of the root that it watches, and `folder` where that is.
    """

    url: str = ""
    root: str | None = None
    folder: str | None = None
    token: str | None = None
    ready: bool = True
    versions: list[Version] = field(default_factory=list)
    engines: list[Engine] = field(default_factory=list)
    outcomes: list[WaitOutcome] = field(default_factory=lambda: [WaitOutcome.SERVED])
    followers: list[str] = field(default_factory=list[str])
    plan: ReclaimPlan = field(default_factory=lambda: ReclaimPlan(items=[], freed_bytes=0))
    sentences: list[str] = field(default_factory=lambda: ["It is well."])
    faults: Faults = field(default_factory=Faults)
    runs: list[RunGlance] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    news: list[Event] = field(default_factory=list)
    trouble: Problem | None = None
    asked: list[str] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)

    def version(self, wanted: str) -> Version:
        for version in self.versions:
            if version.id == wanted:
                return version
        raise _ProblemError(404, "unknown-version", f"no version {wanted}")

    def engine(self, wanted: str) -> Engine:
        for engine in self.engines:
            if engine.id == wanted:
                return engine
        raise _ProblemError(404, "unknown-engine", f"no engine {wanted}")

    def derived_runs(self) -> list[RunGlance]:
        """How runs stand by their versions and engines, for a test that does not say it."""
        names = {version.run for version in self.versions} | {engine.run for engine in self.engines if engine.run}
        return [self._derived_run(run) for run in sorted(names)]

    def _derived_run(self, run: str) -> RunGlance:
        good = [
            version
            for version in self.versions
            if version.run == run and not version.barred and (version.state is VersionState.SEALED or version.in_memory)
        ]
        target = max(good, key=lambda version: (version.generation, version.step), default=None)
        mine = [engine for engine in self.engines if engine.run == run]
        return make_run(
            run=run,
            target=None if target is None else target.id,
            engines=dict(Counter(engine.state for engine in mine)),
            in_sync=sum(
                target is not None and engine.version == target.id and engine.state is EngineState.IN_SYNC
                for engine in mine
            ),
        )

    def put(self, version: Version) -> Version:
        self.versions = [version if known.id == version.id else known for known in self.versions]
        return version

    def next_outcome(self) -> WaitOutcome:
        return self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]


def _say(document: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(document), status_code=status, media_type="application/json")


def _app(state: StandIn) -> FastAPI:  # noqa: C901 - a table of routes
    app = FastAPI()

    @app.middleware("http")
    async def gate(request: Request, call_next: Any) -> Response:
        query = f"?{request.url.query}" if request.url.query else ""
        state.asked.append(f"{request.method} {request.url.path}{query}")
        given = request.headers.get("authorization")
        if request.method != "GET" and state.token is not None and given != f"Bearer {state.token}":
            return _refuse(_ProblemError(401, "unauthorized", "this needs the bearer token").problem)
        if state.trouble is not None:
            return _refuse(state.trouble)
        return await call_next(request)

    @app.exception_handler(_ProblemError)
    async def problem(_: Request, error: _ProblemError) -> Response:
        return _refuse(error.problem)

    @app.get("/readyz")
    async def readyz() -> Response:
        return _say({}, 200 if state.ready else 503)

    @app.get("/v1/versions")
    async def list_versions(request: Request, limit: int = 50, cursor: int = 0) -> Response:
        run, wanted = request.query_params.get("run"), request.query_params.get("state")
        found = [
            version for version in state.versions if run in {None, version.run} and wanted in {None, version.state}
        ]
        found.sort(key=lambda each: (each.created_at if run is None else "", each.generation, each.step), reverse=True)
        more = str(cursor + limit) if len(found) > cursor + limit else None
        page = found[cursor : cursor + limit]
        return _say(VersionPage(items=page, next_cursor=more, root=state.root, folder=state.folder))

    @app.post("/v1/versions")
    async def announce(request: Request) -> Response:
        notice = msgspec.json.decode(await request.body(), type=Notice)
        state.bodies.append(notice)
        generation = 2 if (notice.path or "").endswith(".g2") else 1
        version = make_version(
            notice.step, run=notice.run, generation=generation, state=VersionState.ANNOUNCED, metadata=notice.metadata
        )
        version = replace(version, engines=[on_version(engine, version.id) for engine in state.engines])
        state.versions.append(version)
        return _say(version, 202)

    @app.get("/v1/versions/{wanted}")
    async def version(wanted: str) -> Response:
        return _say(state.version(wanted))

    @app.get("/v1/versions/{wanted}/wait")
    async def wait(wanted: str) -> Response:
        outcome = state.next_outcome()
        return _say(WaitResult(version=state.version(wanted), outcome=outcome, followers=state.followers))

    @app.put("/v1/versions/{wanted}/pin")
    async def pin(wanted: str) -> Response:
        return _say(state.put(replace(state.version(wanted), pinned=True)))

    @app.delete("/v1/versions/{wanted}/pin")
    async def unpin(wanted: str) -> Response:
        return _say(state.put(replace(state.version(wanted), pinned=False)))

    @app.post("/v1/rollback")
    async def rollback(request: Request) -> Response:
        order = msgspec.json.decode(await request.body(), type=Rollback)
        state.bodies.append(order)
        return _say(state.version(order.to) if order.to else state.versions[0])

    @app.get("/v1/rollback")
    async def rollback_plan(run: str, to: str | None = None) -> Response:
        goal = state.version(to) if to else state.versions[0]
        barred = sorted((v.id for v in state.versions if v.run == run and v.step > goal.step), reverse=True)
        away = [engine.id for engine in state.engines if engine.state is EngineState.UNREACHABLE]
        leaves = barred[0] if barred else goal.id
        return _say(RollbackPlan(run=run, leaves=leaves, goal=goal.id, barred=barred, unreachable=away))

    @app.get("/v1/receivers")
    async def receivers() -> Response:
        """One rank on this host: a hand-over is tried."""
        inside = Receiver(engine="engine-0", rank=0, name="0-1-ab.sock", host=host_name(), boot=boot_id())
        return _say(Receivers(receivers=[inside]))

    @app.get("/v1/engines")
    async def engines() -> Response:
        return _say(Page(items=state.engines))

    @app.post("/v1/engines")
    async def add_engine(request: Request) -> Response:
        new = msgspec.json.decode(await request.body(), type=NewEngine)
        state.bodies.append(new)
        return _say(make_engine(new.id or "engine-9", url=new.url, run=new.run, state=EngineState.PROBING), 201)

    @app.post("/v1/engines/move")
    async def move_engines(request: Request) -> Response:
        order = msgspec.json.decode(await request.body(), type=Move)
        state.bodies.append(order)
        found = [state.engine(name) for name in order.engines]
        if not order.insist and any(engine.run != order.run for engine in found):
            raise _ProblemError(409, "run-open", f"{found[0].id} follows {found[0].run}, which is not closed")
        return _say(Page(items=[replace(engine, run=order.run, moved=True) for engine in found]))

    @app.post("/v1/runs")
    async def change_run(request: Request) -> Response:
        order = msgspec.json.decode(await request.body(), type=RunChange)
        state.bodies.append(order)
        seen = next((run for run in state.runs if run.run == order.run), make_run(run=order.run))
        now = "2026-11-21T12:00:00Z"
        return _say(replace(seen, closed_at=now if order.closed else None, paused_since=now if order.paused else None))

    @app.delete("/v1/runs/{run:path}")
    async def delete_run(run: str) -> Response:
        if run not in {each.run for each in state.runs}:
            raise _ProblemError(409, "run-needed", f"a publisher holds run {run}: end its trainer")
        state.runs = [each for each in state.runs if each.run != run]
        return _say(DeletedRun(run=run, versions=2))

    @app.delete("/v1/engines/{wanted}")
    async def remove_engine(wanted: str) -> Response:
        state.engines.remove(state.engine(wanted))
        return Response(status_code=204)

    @app.post("/v1/engines/{wanted}/resync")
    async def resync(wanted: str) -> Response:
        return _say(state.engine(wanted), 202)

    @app.get("/v1/reclaim/plan")
    async def plan() -> Response:
        return _say(state.plan)

    @app.post("/v1/reclaim")
    async def reclaim() -> Response:
        return _say(replace(state.plan, done=True))

    @app.get("/v1/overview")
    async def overview() -> Response:
        return _say(make_overview(state))

    @app.get("/v1/log")
    async def log() -> Response:
        return _say(Page(items=state.events))

    @app.get("/v1/events")
    async def events(request: Request) -> Response:
        """What is new since the reader's last event; then 204, which ends a stream (WHATWG)."""
        last = int(request.headers["last-event-id"])
        news = [event for event in state.news if event.seq > last]
        if not news:
            return Response(status_code=204)
        return Response(b"".join(map(encode, news)), media_type="text/event-stream")

    @app.get("/v1/explain/{subject}")
    async def explain(subject: str) -> Response:
        return _say(Explanation(id=subject, sentences=state.sentences))

    return app


def _refuse(problem: Problem) -> Response:
    return Response(msgspec.json.encode(problem), status_code=problem.status, media_type="application/problem+json")


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


@contextmanager
def stand_in() -> Iterator[StandIn]:
    """Serve on a free port of loopback."""
    state = StandIn()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        state.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = _Server(uvicorn.Config(_app(state), log_config=None, lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            server.listening.wait(30)
            yield state
        finally:
            server.should_exit = True
            thread.join()
