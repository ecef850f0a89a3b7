"""Turns the service's records into the types of the API. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import fields

from refitd.explain.hosts import host_words
from refitd.policy.traffic import steps_from
from refitd.state.faults import FollowedUpstream
from refitd.state.records import AttemptRecord, EngineRecord, UpdateRecord
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.update.targets import Targets
from refitd_client.contract.naming import parse_version_id
from refitd_client.contract.states import EngineState, Kind, VersionState
from refitd_client.contract.wire import Attempt, Engine, EngineOnVersion, Version


def present_version(
    record: VersionRecord,
    engines: Collection[EngineRecord],
    *,
    update: UpdateRecord | None = None,
    hosts: Mapping[str, str] | None = None,
    refused: str | None = None,
    waits_for: str | None = None,
) -> Version:
    """Return a version as the API shows it, with the engines that follow its run.

    `hosts` has by their ids what engines do that are hosts and carry out an order. `refused` is why a delta cannot be
    carried out, `waits_for` what it waits for.
    """
    return Version(
        id=record.id,
        run=record.run,
        generation=record.order.generation,
        step=record.order.step,
        kind=record.kind,
        state=record.state,
        glance=record.state.glance,
        reason=record.doubt or record.reason or refused or waits_for,
        base=record.base,
        needs_full=refused is not None or (record.kind is Kind.DELTA and record.state.is_bad),
        path=record.path,
        bytes=record.files.bytes,
        digest=record.digest,
        pinned=record.pinned,
        barred=record.barred,
        created_at=record.created_at,
        in_memory=record.in_memory,
        proved_by=list(record.verdict.proved_by),
        engines=[_on_version(engine, record, update, (hosts or {}).get(engine.id)) for engine in engines],
        timings=record.career.timings,
        metadata=record.announced.metadata,
        allow_missing=list(record.announced.may_lack),
        allow_extra=record.announced.allow_extra,
        left_out=list(record.files.left_out),
        left_out_count=record.files.left_out_count,
        notes=list(record.verdict.notes),
    )


def _on_version(
    engine: EngineRecord, record: VersionRecord, update: UpdateRecord | None, does: str | None
) -> EngineOnVersion:
    serving = engine.serving if engine.known and engine.state is not EngineState.UNREACHABLE else None
    return EngineOnVersion(
        id=engine.id,
        state=engine.state,
        step=_step_beside(record, serving),
        reason=does or _why(engine, update) or _why_not(engine, record),
        serves=serving == record.id and engine.doubted is None,
        version=serving,
    )


def _why(engine: EngineRecord, update: UpdateRecord | None) -> str | None:
    """Return why an engine is where it is: an operator's pause comes before the engine's own reason."""
    if engine.state is EngineState.BEHIND and update is not None and update.why_paused is not None:
        return update.why_paused
    return engine.reason


def why_now(engine: EngineRecord, store: Store, targets: Targets) -> str | None:
    """Return why an engine is where it is, or what its host does: while that loads, before why a load of it failed."""
    hosts = host_words()
    if (shared := hosts.shares_name(engine)) is not None:
        return shared
    why, does = _why(engine, store.updates.get(engine.run or "")), hosts.does(engine, store)
    if engine.state.is_loading:
        return does or why
    why = why or hosts.unknown(engine, store, targets)
    left = left_on_barred(engine, store, targets) or _nothing_left(engine, targets)
    return why or does or left or of_upstream(engine, store)


def left_on_barred(engine: EngineRecord, store: Store, targets: Targets) -> str | None:
    """Return that an engine serves a barred version because there is nothing good to bring it back to, and what helps.

    So it is after a canary has refused the first version of a run.
    """
    serving = store.versions.get(engine.serving or "")
    if engine.state is not EngineState.IN_SYNC or serving is None or not serving.barred:
        return None
    if engine.run != serving.run or targets.target_of(engine.run) is not None:
        return None
    lacks = f"serves {serving.id}, which is barred, and there is no good version to go back to"
    restart = "" if engine.pulls else ", or restart the engine to have what it was started with"
    return f"{lacks}: publish the next step{restart}"


def _nothing_left(engine: EngineRecord, targets: Targets) -> str | None:
    """Return that there is nothing to bring an engine to, where the files of its run's target are lost."""
    goals = targets.of_run(engine.run) if engine.run is not None else None
    if engine.state is not EngineState.BEHIND or goals is None or goals.target is None or goals.loadable is not None:
        return None
    if goals.target.state is not VersionState.LOST:
        return None
    return f"nothing is left to load: the files of {goals.target.id} are lost; publish the next step"


def of_upstream(engine: EngineRecord, store: Store) -> str | None:
    """Return what an engine of a host that follows waits for, or that nothing is heard from the upstream."""
    if engine.state is not EngineState.IN_SYNC or engine.run is None:
        return None
    if (word := upstream_of(store, engine.run)) is None:
        return None
    serving, update = store.versions.get(engine.serving or ""), store.updates.get(engine.run)
    is_paused = update is not None and update.paused_since is not None
    newest = next(iter(store.versions_of(engine.run)), None)
    return word.trouble or word.waits_for(serving, newest, is_paused=is_paused)


def upstream_of(store: Store, run: str) -> FollowedUpstream | None:
    """Return what is known of the upstream of a run; None where it is followed from none."""
    word = store.runs.upstream
    return word if word is not None and word.run == run else None


def orders_of_hosts(engines: Collection[EngineRecord], store: Store) -> dict[str, str]:
    """Return what hosts do that carry out an order, or wait for their own operators, by their ids. It comes before why
    a load of them failed.
    """
    carrying = (engine for engine in engines if engine.seen.host is not None and engine.state.is_loading)
    waiting = (engine for engine in engines if engine.waits is not None and engine.state is EngineState.BEHIND)
    return {
        engine.id: does for engine in (*carrying, *waiting) if (does := host_words().does(engine, store)) is not None
    }


def _why_not(engine: EngineRecord, record: VersionRecord) -> str | None:
    """Return why its last load of this version failed, where nothing is wrong with the engine since."""
    last = engine.trouble.last_attempt
    return last.reason if last is not None and last.version == record.id and engine.serving != record.id else None


def _step_beside(record: VersionRecord, version: str | None) -> int | None:
    """Return the step of a version of the record's run and generation: those of others cannot be compared with it."""
    parsed = parse_version_id(version or "")
    is_comparable = parsed is not None and (parsed[0], parsed[1].generation) == (record.run, record.order.generation)
    return parsed[1].step if parsed is not None and is_comparable else None


def steps_behind(engine: EngineRecord, targets: Targets) -> int | None:
    """Return the trainer's steps from what an engine serves to its run's target. See `Engine.behind`."""
    target = targets.of_run(engine.run).target if engine.run else None
    serving = parse_version_id(engine.serving or "")
    if target is None or serving is None:
        return None
    if (serving[0], serving[1].generation) != (target.run, target.order.generation):
        return None
    return steps_from(serving[1], target.order)


def present_engine(record: EngineRecord, store: Store, targets: Targets) -> Engine:
    serving, parsed = store.versions.get(record.serving or ""), parse_version_id(record.serving or "")
    seen = record.seen
    return Engine(
        id=record.id,
        url=record.url,
        pair=record.naming.pair,
        state=record.state,
        glance=record.state.glance,
        run=record.run,
        version=record.serving,
        step=None if parsed is None else parsed[1].step,
        behind=steps_behind(record, targets),
        weight_version=record.contents.weight_version,
        reason=why_now(record, store, targets),
        paused=not record.known or record.debts.resume_owed,
        last_attempt=None if record.trouble.last_attempt is None else present_attempt(record.trouble.last_attempt),
        skipped=record.contents.skipped,
        server=seen.server or None,
        server_version=seen.server_version or None,
        proof=record.contents.proof if record.known and record.serving is not None else None,
        plugin=seen.plugin,
        stock_reason=seen.stock_reason,
        through_loader=None if seen.loader is None else seen.loader.reason,
        loads_whole=seen.loader is not None and seen.loader.whole,
        draft=seen.draft,
        in_memory=serving is not None and serving.in_memory,
        known=record.known,
        unreachable_since=store.away_since.get(record.id),
        moved=record.naming.moved,
        host=seen.host,
    )


def present_attempt(record: AttemptRecord) -> Attempt:
    return Attempt(**{each.name: getattr(record, each.name) for each in fields(Attempt)})
