"""What a probe or a refit says about an engine. Pure: the record before and what was seen in, the record after out."""

from dataclasses import dataclass, replace

from refitd.engine.port import Outcome, Reached, Refit, Unreached
from refitd.rollout.plan import QUARANTINE_AFTER
from refitd.rollout.record import EngineRecord
from refitd_client.contract.states import EngineState


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What an engine says of itself while it serves a version: the path as it sees it, and its label."""

    path: str
    label: str


def after_probe(
    engine: EngineRecord, seen: Reached | Unreached, expected: Expected | None, target: str | None, now: float
) -> EngineRecord:
    """The record after a probe. `expected` belongs to `engine.serving`; `target` is the version id it should serve."""
    if isinstance(seen, Unreached):
        since = engine.unreachable_since if engine.unreachable_since is not None else now
        return replace(engine, state=EngineState.UNREACHABLE, reason=seen.reason, unreachable_since=since)
    engine = replace(
        engine,
        unreachable_since=None,
        weight_version=seen.weight_version,
        model_path=seen.model_path,
        configuration=seen.configuration,
        startup_path=seen.startup_path or engine.startup_path,
    )
    if not engine.known:
        return _still_tainted(engine, seen)
    if engine.serving is not None and (expected is None or not _as_expected(seen, expected)):
        reason = f"serves {seen.model_path} as {seen.weight_version!r} and no longer {engine.serving}: it was restarted"
        engine = replace(engine, serving=None, reason=reason, failures=0)
    return standing(engine, target)


def _as_expected(seen: Reached, expected: Expected) -> bool:
    return (seen.model_path, seen.weight_version) == (expected.path, expected.label)


def _still_tainted(engine: EngineRecord, seen: Reached) -> EngineRecord:
    """Contents stay unknown, but for a quarantined engine that is back on its start-up weights: a new process."""
    if engine.state is EngineState.QUARANTINED:
        if seen.startup_path is None or seen.model_path != seen.startup_path:
            return engine
        return replace(
            engine,
            state=EngineState.BEHIND,
            known=True,
            serving=None,
            unproven=(),
            failures=0,
            reason="was restarted",
        )
    return replace(engine, state=EngineState.TAINTED)


def standing(engine: EngineRecord, target: str | None) -> EngineRecord:
    """Put an engine with known contents where it stands towards the target."""
    if target is None or engine.serving == target:
        return replace(engine, state=EngineState.IN_SYNC, reason=None if engine.serving else "no version to serve yet")
    if engine.state is EngineState.NACKED:
        return engine
    return replace(engine, state=EngineState.BEHIND)


def after_refit(engine: EngineRecord, version: str, refit: Refit, now: float) -> EngineRecord:
    """The record after a refit to `version`."""
    failed = replace(engine, failures=engine.failures + 1, reason=refit.reason)
    match refit.outcome:
        case Outcome.ACK:
            return replace(
                engine,
                state=EngineState.IN_SYNC,
                serving=version,
                known=True,
                unproven=(),  # loads do not overlap in a server: one that was proved to end proves the earlier ones too
                resume_owed=not refit.resumed,
                failures=0,
                reason=None,
                unreachable_since=None,
            )
        case Outcome.NACK:
            return replace(failed, state=EngineState.NACKED, resume_owed=not refit.resumed)
        case Outcome.TAINTED:
            quarantined = failed.failures >= QUARANTINE_AFTER
            state = EngineState.QUARANTINED if quarantined else EngineState.TAINTED
            unproven = (*(each for each in engine.unproven if each != version), version)
            return replace(failed, state=state, serving=None, known=False, unproven=unproven)
        case Outcome.UNREACHABLE:
            since = engine.unreachable_since if engine.unreachable_since is not None else now
            return replace(
                failed,
                state=EngineState.UNREACHABLE,
                unreachable_since=since,
                resume_owed=engine.known and not refit.resumed,
            )
