"""Which engines serve a version, and where the others are: a sentence for each, or one for many that are alike."""

from collections.abc import Iterable, Mapping

from refitd.api.present import orders_of_hosts
from refitd.policy.goals import passed_over, question_about
from refitd.policy.upstream import is_here
from refitd.state.records import EngineRecord, UpdateRecord
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.text import FEW, listed
from refitd.update.targets import Targets
from refitd_client.contract.states import EngineState, VersionState


def on_engines(record: VersionRecord, store: Store, targets: Targets) -> list[str]:
    """Say how a version's update stands, which engines serve it and which do not yet.

    Args:
        record: the version.
        store: what the service knows.
        targets: what engines are to serve.
    """
    target = targets.of_run(record.run).target
    engines = [engine for engine in store.engines.values() if engine.run == record.run]
    sentences: list[str] = []
    if target is not None and target.id != record.id:
        sentences.append(f"The target of run {record.run} is {target.id}.")
        if passed_over(store.versions_of(record.run), target) == record:
            asked = question_about(record, target)
            sentences.append(f"{asked[0].upper()}{asked[1:]}.")
    if not engines:
        is_closed = record.run in store.runs.closed
        rest = ", which is closed." if is_closed else f": 'refitd explain {record.run}' says what to do."
        sentences.append(f"No engine follows run {record.run}{rest}")
    update = store.updates.get(record.run)
    if update is not None and update.version == record.id:
        sentences += _its_update(record, update, target)
    is_next = target is not None and (record.id == target.id or is_here(record, target))
    if update is not None and update.paused_since is not None and is_next:
        sentences.append(paused_since(update))
    there = [engine for engine in engines if engine.serving == record.id]
    sentences += _serving(there)
    if record.state is VersionState.LOST:
        if target is not None and target.id == record.id:
            left = what_is_left(targets.of_run(record.run).loadable)
            sentences.append(f"{left[0].upper()}{left[1:]}: publish the next step.")
    elif target is not None and target.id == record.id:
        sentences += _late([engine for engine in engines if engine.serving != record.id], store)
    return sentences


def what_is_left(loadable: VersionRecord | None) -> str:
    """Say what engines load that do not serve a target whose files are lost, as a clause.

    Args:
        loadable: the newest version that they can be brought to.
    """
    others = "an engine that does not serve it"
    return f"{others} has nothing left to load" if loadable is None else f"{others} is brought to {loadable.id}"


def overtaken_by(record: VersionRecord, store: Store, targets: Targets) -> VersionRecord | None:
    """Return the run's target where it is newer than a good version that was not served."""
    target = targets.of_run(record.run).target
    if target is None or target.order <= record.order or record.barred or record.served_at is not None:
        return None
    is_held = any(engine.serving == record.id for engine in store.engines.values())
    return None if is_held or record.state is not VersionState.SEALED else target


def _its_update(record: VersionRecord, update: UpdateRecord, target: VersionRecord | None) -> list[str]:
    """Say how a version's own update stands, where there is more to it than the engines."""
    why = "" if update.reason is None else f": {update.reason}"
    if record.barred and target is None:
        return [f"Its update has ended, and there is no good version to go back to{why}."]
    return [f"Its update is {update.state}{why}."] if why else []


def _serving(engines: Iterable[EngineRecord]) -> list[str]:
    """Say which engines serve a version: in one sentence where they are many."""
    seen, away = list[EngineRecord](), list[EngineRecord]()
    for engine in engines:
        (away if engine.state is EngineState.UNREACHABLE else seen).append(engine)
    found: list[str] = []
    for group, claim in ((seen, "serve it"), (away, "served it when they were last reached")):
        if len(group) > FEW:
            found.append(f"{len(group):,} engines {claim}: {listed([engine.id for engine in group])}.")
        else:
            found += [f"Engine {engine.id} {engine.serves('it')}." for engine in group]
    return found


def _late(engines: Iterable[EngineRecord], store: Store) -> list[str]:
    """Say which engines do not serve a run's target yet, and what they do: in one sentence for many in one state."""
    states: dict[EngineState, list[EngineRecord]] = {}
    for engine in engines:
        states.setdefault(engine.state, []).append(engine)
    found: list[str] = []
    for state, group in states.items():
        does = orders_of_hosts(group, store)
        if len(group) <= FEW:
            found += [f"Engine {engine.id} does not serve it yet: {_where(engine, does)}." for engine in group]
            continue
        whys = ((engine.id, does.get(engine.id) or engine.reason) for engine in group)
        why = next((f" ({name}: {why})" for name, why in whys if why), "")
        held = {engine.serving for engine in group if state is not EngineState.UNREACHABLE}
        serve = f" and serve {held.pop()}" if len(held) == 1 and None not in held else ""
        ids = listed([engine.id for engine in group])
        found.append(f"{len(group):,} engines do not serve it yet; they are {state}{serve}{why}: {ids}.")
    return found


def _where(engine: EngineRecord, does: Mapping[str, str]) -> str:
    """Say what an engine does instead of serving a version. `does` has that of hosts."""
    reason = does.get(engine.id) or engine.reason
    why = f" ({reason})" if reason else ""
    return f"it is {engine.state}{why}, and {engine.serves(contents_of(engine))}"


def contents_of(engine: EngineRecord) -> str:
    """Say what an engine has, whether or not that is a version."""
    unproven = engine.of_others or "its start-up weights" if engine.known else "unknown contents"
    return engine.serving or unproven


def paused_since(update: UpdateRecord) -> str:
    """Say since when a run's updates are paused, and what resumes them."""
    return f"Updates of run {update.run} are paused since {update.paused_since}: 'refitd resume {update.run}'."
