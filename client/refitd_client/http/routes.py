"""The routes of the HTTP API (v1), each described once: method, path, body and the type of the answer. Pure.

The client makes its methods from these functions (`client.py`), signatures and docstrings included.

>>> pin("exp~v000007")
Call(method='PUT', path='/v1/versions/exp~v000007/pin', result=<class '...Version'>, ...)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote

from refitd_client.contract.follow import HostReply, HostReport
from refitd_client.contract.history import EnginePast, History
from refitd_client.contract.plugin import Receivers
from refitd_client.contract.states import LogSeverity, VersionState
from refitd_client.contract.wire import (
    Attempt,
    DeletedRun,
    Engine,
    Event,
    Explanation,
    Move,
    NewEngine,
    Notice,
    Overview,
    Page,
    ReclaimPlan,
    Rollback,
    RollbackPlan,
    RunChange,
    RunGlance,
    Version,
    VersionPage,
    WaitResult,
)

ResultT = TypeVar("ResultT")
WaitFor = Literal["served", "sealed", "taken"]
_SMALL = 2**20  # bytes of an answer that does not grow with the fleet


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[ResultT]):
    """One request. `result` is the type of its answer's body, None where the body does not matter.

    `repeatable` says that sending it twice does what sending it once does, so that it may be sent again when the
    reply was lost. `patience` is how many seconds the service may think before it answers (long polls), `most` how many
    bytes its answer may have.
    """

    method: str
    path: str
    result: type[ResultT]
    params: dict[str, str] = field(default_factory=dict[str, str])
    body: Any = None
    repeatable: bool = True
    patience: float = 0.0
    most: int = 64 * 2**20  # a page of versions with thousands of engines has some


def announce(notice: Notice) -> Call[Version]:
    """Say that weights are ready. Returns once the service has it on disk; the same notice again is harmless."""
    return Call(method="POST", path="/v1/versions", result=Version, body=notice)


def versions(
    run: str | None = None, state: VersionState | None = None, limit: int = 50, cursor: str | None = None
) -> Call[VersionPage]:
    """A page of the versions, newest first.

    Within one run they are ordered by generation and step, across runs by when the service first saw them.

    Args:
        run: only versions of this run.
        state: only versions in this state.
        limit: versions on a page.
        cursor: `next_cursor` of the page before.
    """
    params = _params(run=run, state=state, limit=limit, cursor=cursor)
    return Call(method="GET", path="/v1/versions", result=VersionPage, params=params)


def version(version_id: str) -> Call[Version]:
    """One version."""
    return Call(method="GET", path=_path("versions", version_id), result=Version)


def wait(version_id: str, wait_for: WaitFor, timeout: float) -> Call[WaitResult]:
    """One long poll.

    Args:
        version_id: the version.
        wait_for: what is waited for.
        timeout: seconds after which the service answers `pending`.
    """
    params = {"for": wait_for, "timeout": f"{timeout:.3f}"}
    path = _path("versions", version_id, "wait")
    return Call(method="GET", path=path, result=WaitResult, params=params, patience=timeout)


def pin(version_id: str) -> Call[Version]:
    """Keep a version until it is unpinned, whatever the keep rules say."""
    return Call(method="PUT", path=_path("versions", version_id, "pin"), result=Version)


def unpin(version_id: str) -> Call[Version]:
    """Leave a version to the keep rules again."""
    return Call(method="DELETE", path=_path("versions", version_id, "pin"), result=Version)


def rollback(run: str, to: str | None = None) -> Call[Version]:
    """Bring a run's engines to the version `to`, else to the last good one before the current; returns it.

    Without `to` it is not sent again when the reply is lost, since twice would go back two versions.
    """
    body = Rollback(run=run, to=to)
    return Call(method="POST", path="/v1/rollback", result=Version, body=body, repeatable=to is not None)


def rollback_plan(run: str, to: str | None = None) -> Call[RollbackPlan]:
    """Where `rollback` would lead, and what it would bar for good. Nothing is done.

    With the plan's `goal` as `to`, `rollback` goes there and no further back, even if another client was faster.
    """
    return Call(method="GET", path="/v1/rollback", result=RollbackPlan, params=_params(run=run, to=to))


def attempts(version_id: str, limit: int = 500) -> Call[Page[Attempt]]:
    """How engines were brought to a version: its newest loads, each with the time of its stages."""
    params = {"limit": str(limit)}
    return Call(method="GET", path=_path("versions", version_id, "attempts"), result=Page[Attempt], params=params)


def history(run: str | None = None, limit: int = 1000) -> Call[History]:
    """The last updates, newest first, with percentiles of pauses and of the time to serve.

    Args:
        run: only updates of this run.
        limit: how many, at most 1,000.
    """
    return Call(method="GET", path="/v1/history", result=History, params=_params(run=run, limit=limit))


def engine_history(engine_id: str, limit: int = 200) -> Call[EnginePast]:
    """The newest `limit` loads of an engine, and the times for which it was away."""
    params = {"limit": str(limit)}
    return Call(method="GET", path=_path("history", "engines", engine_id), result=EnginePast, params=params)


def pause(run: str) -> Call[RunGlance]:
    """Bring no engine of a run to a newer version until it is resumed."""
    return Call(method="POST", path="/v1/runs", result=RunGlance, body=RunChange(run=run, paused=True))


def resume(run: str) -> Call[RunGlance]:
    """Let the updates of a run go on."""
    return Call(method="POST", path="/v1/runs", result=RunGlance, body=RunChange(run=run, paused=False))


def overview() -> Call[Overview]:
    """Everything at a glance. `event` is the number after which the event stream goes on from there."""
    return Call(method="GET", path="/v1/overview", result=Overview)


def log(
    subject: str | None = None,
    before: str | None = None,
    limit: int = 50,
    *,
    run: str | None = None,
    engine: str | None = None,
    severity: LogSeverity | None = None,
) -> Call[Page[Event]]:
    """A page of the log of decisions, newest first. With a filter it may be short, or empty, before the last.

    Args:
        subject: only entries about this run, version or engine.
        before: `next_cursor` of the page before.
        limit: entries on a page.
        run: only what concerns this run: its versions, its updates, and engines while they followed it.
        engine: only entries about this engine.
        severity: only entries that are at least so grave.
    """
    params = _params(subject=subject, run=run, engine=engine, severity=severity, before=before, limit=limit)
    return Call(method="GET", path="/v1/log", result=Page[Event], params=params)


def engines(run: str | None = None, serves: str | None = None) -> Call[Page[Engine]]:
    """The fleet.

    Args:
        run: only engines that follow this run.
        serves: only engines that answer with this step now ("120"), or with this step or a later one (">=120").
    """
    params = _params(run=run, serves=serves)
    return Call(method="GET", path="/v1/engines", result=Page[Engine], params=params)


def engine(engine_id: str) -> Call[Engine]:
    """One engine."""
    return Call(method="GET", path=_path("engines", engine_id), result=Engine)


def receivers(run: str) -> Call[Receivers]:
    """The ranks of a run's engines that can receive weights over a process group. `run` is the run."""
    return Call(method="GET", path="/v1/receivers", result=Receivers, params={"run": run})


def add_engine(new: NewEngine) -> Call[Engine]:
    """Take an engine into the fleet. It is brought to its run's target at once."""
    # Not repeatable: the second time would be a conflict.
    return Call(method="POST", path="/v1/engines", result=Engine, body=new, repeatable=False)


def move_engines(engine_ids: Sequence[str], run: str, *, insist: bool = False) -> Call[Page[Engine]]:
    """Have engines follow another run from now on, which need not have published yet; returns them.

    They go on serving what they serve until they have loaded that run's target. The move outlives restarts.

    Args:
        engine_ids: engines' ids or URLs; all are moved, or none.
        run: the run to follow.
        insist: also move engines of a run that is not closed, which loses them; without it that is a `ConflictError`.
    """
    body = Move(engines=list(engine_ids), run=run, insist=insist)
    return Call(method="POST", path="/v1/engines/move", result=Page[Engine], body=body)


def close_run(run: str) -> Call[RunGlance]:
    """Say that a run has ended: it wants no engines any more, and those that follow it are free for another run.

    Collection keeps its newest good version, with what engines need and what is pinned, and one without a verdict
    if it is newer. It deletes the others. The next version that is published opens it again.
    """
    return Call(method="POST", path="/v1/runs", result=RunGlance, body=RunChange(run=run, closed=True))


def reopen_run(run: str) -> Call[RunGlance]:
    """Take back that a run has ended. What was deleted meanwhile stays deleted."""
    return Call(method="POST", path="/v1/runs", result=RunGlance, body=RunChange(run=run, closed=False))


def delete_run(run: str) -> Call[DeletedRun]:
    """Delete a run with all its versions, for good. Their files go in the background.

    It is a `ConflictError` while a publisher or an engine needs it, or a version of it is pinned.
    """
    # Not repeatable: the second time it would not be found.
    return Call(method="DELETE", path=_path("runs", run), result=DeletedRun, repeatable=False)


def remove_engine(engine_id: str) -> Call[None]:
    """Take an engine out of the fleet. It goes on serving what it serves."""
    # Not repeatable: the second time it would not be found.
    return Call(method="DELETE", path=_path("engines", engine_id), result=type(None), repeatable=False)


def resync(engine_id: str) -> Call[Engine]:
    """Load an engine's target again, whatever the engine claims to serve."""
    return Call(method="POST", path=_path("engines", engine_id, "resync"), result=Engine)


def reclaim_plan() -> Call[ReclaimPlan]:
    """What would be deleted and what kept, with the reasons."""
    return Call(method="GET", path="/v1/reclaim/plan", result=ReclaimPlan)


def reclaim() -> Call[ReclaimPlan]:
    """Delete what is not needed any more; returns what was done."""
    return Call(method="POST", path="/v1/reclaim", result=ReclaimPlan, patience=60.0)  # deleting takes its time


def explain(subject: str) -> Call[Explanation]:
    """Why a run (by its name), a version (its id) or an engine (its id or URL) is where it is."""
    return Call(method="GET", path=_path("explain", subject), result=Explanation)


def report(report: HostReport) -> Call[HostReply]:
    """Tell the upstream what a follower has, and lease what it pulls; returns from whom to pull."""
    return Call(method="PUT", path=_path("hosts", report.told.follower), result=HostReply, body=report, most=_SMALL)


def events() -> Call[None]:
    """The event stream, which `EventReader` reads."""
    return Call(method="GET", path="/v1/events", result=type(None), most=_SMALL)


def probe(path: Literal["/healthz", "/readyz"]) -> Call[None]:
    """Liveness or readiness."""
    return Call(method="GET", path=path, result=type(None), most=_SMALL)


def _path(*parts: str) -> str:
    """The path under /v1. An id is one segment, whatever characters it has.

    Raises:
        ValueError: an id that would lead to another route: it is empty, '.' or '..'.
    """
    for part in parts:
        if part in {"", ".", ".."}:
            raise ValueError(f"{part!r} is not the id of a version or an engine")
    return "/".join(["/v1", *(quote(part, safe="") for part in parts)])


def _params(**params: object) -> dict[str, str]:
    return {name: str(value) for name, value in params.items() if value is not None}
