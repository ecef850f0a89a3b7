"""How a run stands: whether its engines are on the newest version, and if not, why not, in sentences.

The dashboard, `refitd top` and `refitd status` show these very words, so that all say the same.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from refitd.explain.hosts import host_words
from refitd.explain.present import upstream_of
from refitd.explain.version import what_is_left
from refitd.policy.contest import SAID_FOR, STOP_THE_OTHER
from refitd.policy.goals import passed_over, question_about
from refitd.policy.roster import how_to_bring
from refitd.policy.strategy import Strategy, has_given_up, released, why_waiting
from refitd.state.faults import FollowedUpstream
from refitd.state.records import EngineRecord, UpdateRecord
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.text import FEW, capitalized, listed
from refitd.update.targets import Targets
from refitd_client.contract.states import EngineState, Standing, VersionState
from refitd_client.contract.wire import RunGlance


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a run's standing follows from.

    `target` is the version that engines should serve, `loadable` what those are brought to that do not serve it.
    `others` are engines that follow other runs or none, `closed` the runs that are closed. `hosts` has by their ids
    what engines that are hosts do now, `unknown` what they have that this service does not, and what helps, without a
    subject. `upstream` is what is known of the upstream of the run, where it is followed from one; `elsewhere` why
    no engine is brought to it, where this service follows another run. `began`: the run once had a version.
    """

    run: str
    target: VersionRecord | None
    versions: Sequence[VersionRecord]
    engines: Sequence[EngineRecord]
    update: UpdateRecord | None
    strategy: Strategy
    others: Sequence[EngineRecord] = ()
    closed: Collection[str] = ()
    closed_at: str | None = None
    hosts: Mapping[str, str] = field(default_factory=dict[str, str])
    upstream: FollowedUpstream | None = None
    elsewhere: str | None = None
    loadable: VersionRecord | None = None
    began: bool = False
    unknown: Mapping[str, str] = field(default_factory=dict[str, str])


def glance(seen: RunFacts) -> RunGlance:
    """Say whether a run's engines are on the newest version, and if not, why not. Pure."""
    newest = newest_of(seen.versions)
    there = [engine for engine in seen.engines if _is_there(engine, seen.target)]
    trouble, waiting = _trouble(seen, newest), _waiting(seen, newest)
    paused = seen.update.paused_since if seen.update is not None else None
    standing = _standing(seen, newest, bool(trouble), len(there))
    return RunGlance(
        run=seen.run,
        standing=standing,
        headline=_headline(seen, newest, len(there)),
        reasons=[*_unfollowed(seen), *trouble, *waiting],
        target=None if seen.target is None else seen.target.id,
        target_step=None if seen.target is None else seen.target.order.step,
        newest=None if newest is None else newest.id,
        newest_step=None if newest is None else newest.order.step,
        update=None if seen.update is None else seen.update.state,
        paused_since=paused,
        engines=dict(Counter(engine.state for engine in seen.engines)),
        in_sync=len(there),
        closed_at=seen.closed_at,
        trouble=trouble[0] if standing is Standing.TROUBLED else None,
    )


def newest_of(versions: Iterable[VersionRecord]) -> VersionRecord | None:
    """Return the version that the trainer published last in the newest generation, whatever became of it."""
    left = (version for version in versions if not version.state.is_over)
    return max(left, key=lambda version: version.order, default=None)


def _is_there(engine: EngineRecord, target: VersionRecord | None) -> bool:
    is_there = target is not None and engine.serving == target.id and engine.state is EngineState.IN_SYNC
    return is_there and engine.doubted is None


def _standing(seen: RunFacts, newest: VersionRecord | None, is_troubled: bool, there: int) -> Standing:
    if seen.closed_at is not None:
        return Standing.CLOSED
    if not seen.engines:  # before trouble: without a model that engines serve, its versions cannot even be validated
        return Standing.UNFOLLOWED
    if is_troubled:
        return Standing.TROUBLED
    if newest is not None and seen.target is not None and there == len(seen.engines):
        if newest.id == seen.target.id:
            return Standing.MOVING if _pulls_newer(seen, newest) else Standing.CURRENT
        if _was_left(seen, newest):
            return Standing.ROLLED_BACK
    is_held = seen.upstream is not None and seen.upstream.is_paused and there == len(seen.engines)
    late = [engine for engine in seen.engines if not _is_there(engine, seen.target)]
    are_held = bool(late) and all(engine.waits and engine.state is EngineState.BEHIND for engine in late)
    return Standing.PAUSED if _is_paused(seen) or is_held or are_held else Standing.MOVING


def _pulls_newer(seen: RunFacts, newest: VersionRecord | None) -> bool:
    return seen.upstream is not None and seen.upstream.pulls_newer(newest)


def _was_left(seen: RunFacts, newer: VersionRecord) -> bool:
    """Return whether an operator rolled back from it to the target; what the service barred has a reason."""
    is_ordered = newer.barred and (newer.state is not VersionState.SEALED or newer.reason is None)
    return is_ordered and seen.target is not None and newer.order > seen.target.order


def _is_paused(seen: RunFacts) -> bool:
    return seen.update is not None and seen.update.paused_since is not None


def _headline(seen: RunFacts, newest: VersionRecord | None, there: int) -> str:
    count = len(seen.engines)
    if seen.closed_at is not None:
        who = {0: "no engine follows", 1: "1 engine still follows"}.get(count, f"{count} engines still follow")
        return f"Closed at {seen.closed_at[:16].replace('T', ' ')}Z: {who} it."
    if seen.target is None:
        was_good = any(version.state is VersionState.LOST or version.served_at is not None for version in seen.versions)
        if was_good or (newest is None and seen.began):
            lacks = "good version left."
        else:
            lacks = "good version yet." if newest is not None else "version yet."
        return f"No engine follows this run, and it has no {lacks}" if count == 0 else f"No {lacks}"
    step = _step(seen.target, newest)
    is_newest = newest is not None and newest.id == seen.target.id and not _pulls_newer(seen, newest)
    is_heard = seen.upstream is None or seen.upstream.silent_since is None
    newest_too = ", the newest" if is_newest and is_heard else ""
    newest_too += ", whose files are lost" if seen.target.state is VersionState.LOST else ""
    if count == 0:
        return f"No engine follows this run; {step} is its target."
    if there == count:
        who = "The engine serves" if count == 1 else f"All {count} engines serve"
        return f"{who} {step}{newest_too}."
    return f"{there} of {count} engines serve {step}{newest_too}."


def _step(version: VersionRecord, other: VersionRecord | None) -> str:
    """Name a version by its step, and by its generation where that of the other one differs: steps begin again."""
    step = f"step {version.order.step:,}"
    is_alike = other is None or other.order.generation == version.order.generation
    return step if is_alike else f"{step} of generation {version.order.generation}"


def _unfollowed(seen: RunFacts) -> list[str]:
    """Say what to do about a run that no engine follows."""
    if seen.engines or seen.closed_at is not None:
        return []
    if seen.elsewhere is not None:
        return [seen.elsewhere]
    return [
        f"{how_to_bring(seen.others, seen.run, seen.closed)}; 'refitd runs close {seen.run}' says that it has ended"
    ]


def _trouble(seen: RunFacts, newest: VersionRecord | None) -> list[str]:
    """Say what an operator should look at."""
    found = [_group(seen, state) for state in EngineState.by_need() if state.is_in_trouble]
    found += [capitalized(shared) for e in seen.engines if (shared := host_words().shares_name(e)) is not None]
    found += [_unknown(seen), _contradictory(seen), _fought_over(seen)]
    found += [None if seen.upstream is None else seen.upstream.trouble]
    judged = newest_of(version for version in seen.versions if not _may_become_good(version, seen.target))
    if judged is not None and not _was_left(seen, judged):  # an operator who rolled back from it knows what is wrong
        found.append(_trouble_with(judged, seen.target))
    if seen.target is not None and seen.target.state is VersionState.LOST:
        step, why = _step(seen.target, newest).capitalize(), seen.target.doubt or seen.target.reason
        found.append(f"{step} is LOST: {why or 'for no known reason'}; {what_is_left(seen.loadable)}")
    late = passed_over(seen.versions, seen.target)
    if late is not None and seen.target is not None:
        found.append(capitalized(question_about(late, seen.target)))
    if newest is None and seen.target is None and seen.began:
        found.append("No version of this run is left, so its engines have nothing left to load: publish the next step")
    return [sentence for sentence in found if sentence is not None]


def _may_become_good(version: VersionRecord, target: VersionRecord | None) -> bool:
    """Return whether a version waits for its verdict: until it is good, what is wrong with the one before it stays."""
    is_judged = version.state is VersionState.UNKNOWN or version == target or _is_gone(version)
    return version.state.is_open and not is_judged


def _unknown(seen: RunFacts) -> str | None:
    """Name the hosts that have what this service does not. Why one does not obey is said of its state."""
    mine = sorted(e.id for e in seen.engines if e.id in seen.unknown and e.state is not EngineState.CONTESTED)
    if not mine:
        return None
    others = "" if len(mine) == 1 else f"; so it is with {listed(mine[1:])}"
    return f"{mine[0]} {seen.unknown[mine[0]]}{others}"


def _contradictory(seen: RunFacts) -> str | None:
    """Name the engines that give different contents of one version, where nothing says who is right."""
    mine = sorted(engine.id for engine in seen.engines if engine.doubted is not None)
    if not mine:
        return None
    which = next(engine.serving for engine in seen.engines if engine.id == mine[0])
    return (
        f"{listed(mine)} hold different contents of {which}, and nothing says which are right: a third engine of their "
        f"configuration would decide, or 'refitd engines resync {mine[0]}', if that load agrees with another"
    )


def _fought_over(seen: RunFacts) -> str | None:
    """Name the engines that another writer has changed lately, and that were loaded again. A host says itself why."""
    changed = (each for each in seen.engines if each.trouble.contests and not each.pulls)
    mine = sorted(engine.id for engine in changed if engine.state is not EngineState.CONTESTED)
    if not mine:
        return None
    text = f"{_names(mine)} loaded again where another writer had changed the weights"
    return f"{text}: {STOP_THE_OTHER}; {SAID_FOR}; 'refitd explain {mine[0]}'"


def _trouble_with(newest: VersionRecord, target: VersionRecord | None) -> str | None:
    step = _step(newest, target).capitalize()
    if target is not None and newest.id == target.id:
        is_alone = newest.in_memory and not newest.state.is_open
        return f"{step} is served from memory alone: {newest.reason}" if is_alone else None
    if newest.state.is_bad:
        return f"{step} is {newest.state}: {newest.doubt or newest.reason or 'for no known reason'}"
    if _is_gone(newest) and not newest.barred:
        return f"{step} was in memory alone (durable={newest.durability}), and no engine has it any more"
    if newest.state is VersionState.UNKNOWN:
        return f"{step} is UNKNOWN: {newest.reason}"
    return f"{step} is barred: {newest.reason or 'it was rolled back from'}" if newest.barred else None


def _is_gone(version: VersionRecord) -> bool:
    """Return whether a version that is not the target was served, and was to have no files."""
    return version.durability is not None and version.state.is_open and version.served_at is not None


def _group(seen: RunFacts, state: EngineState) -> str | None:
    """One sentence for all engines in a state: with two hundred, a sentence each is none at all."""
    mine = sorted((engine for engine in seen.engines if engine.state is state), key=lambda engine: engine.id)
    if not mine:
        return None
    why = next((f"{e.id} {seen.hosts[e.id]}" for e in mine if e.id in seen.hosts and not state.is_in_trouble), None)
    if len(mine) > 1 and all(engine.pulls and engine.reason for engine in mine):  # a host's reason names that host
        more = f"; and {len(mine) - FEW} more hosts" if len(mine) > FEW else ""
        why = why or "; ".join(engine.reason or "" for engine in mine[:FEW]) + more
    why = why or next((engine.reason for engine in mine if engine.reason), None)
    return f"{_names([engine.id for engine in mine])} {state}" + (f": {why}" if why else "")


def _names(ids: Sequence[str]) -> str:
    if len(ids) == 1:
        return f"{ids[0]} is"
    more = len(ids) - FEW
    return f"{listed(ids)} are" if more > 0 else f"{', '.join(ids[:-1])} and {ids[-1]} are"


def _waiting(seen: RunFacts, newest: VersionRecord | None) -> list[str]:
    found: list[str] = []
    left = newest_of(version for version in seen.versions if _was_left(seen, version))
    if left is not None and seen.target is not None:
        found.append(_rolled_back(seen.target, left, is_paused=_is_paused(seen)))
    if _is_paused(seen):
        found.append("Updates of this run are paused: no engine goes to a newer version before they are resumed")
    if (up := seen.upstream) is not None and (held := up.waits_for(seen.target, newest, is_paused=_is_paused(seen))):
        found.append(held)
    if newest is not None and newest != seen.target and _is_gone(newest):
        newest = None  # `_trouble_with` says what became of it
    if newest is not None and newest.state is VersionState.ANNOUNCED and newest.handed:
        step = _step(newest, seen.target).capitalize()
        found.append(f"{step} was handed over from its trainer's memory: {newest.files_to_come}")
    elif newest is not None and newest.state is VersionState.SEALED and newest.doubt is not None:
        found.append(f"{_step(newest, seen.target).capitalize()} is SEALED: {newest.doubt}")
    elif newest is not None and newest.state.awaits_verdict:
        why = f": {newest.reason}" if newest.reason else ""
        found.append(f"{_step(newest, seen.target).capitalize()} is {newest.state}{why}")
    busy = (EngineState.UPDATING, EngineState.VERIFYING, EngineState.PROBING)
    found += [sentence for state in busy if (sentence := _group(seen, state)) is not None]
    return [*found, *_turn(seen)]


def _rolled_back(target: VersionRecord, newest: VersionRecord, *, is_paused: bool) -> str:
    to, last = _step(target, newest), _step(newest, target)
    was = "" if newest.state is VersionState.SEALED else f" ({last} is {newest.state})"
    text = f"Rolled back to {to}: newer versions, up to {last}, are barred{was}"
    return text if is_paused else f"{text}. What is published next is loaded as usual"


def _turn(seen: RunFacts) -> list[str]:
    """Name engines that could load and do not: those whose turn it is not, and those that gave the target up."""
    if seen.target is None or _is_paused(seen):
        return []
    behind = [e for e in seen.engines if e.state is EngineState.BEHIND]
    gave_up = sorted(engine.id for engine in behind if has_given_up(engine, seen.target))
    free = released(seen.strategy, seen.target, seen.update, seen.engines)
    later = sorted(engine.id for engine in behind if engine.id not in free)
    found: list[str] = []
    if held := sorted(engine.id for engine in behind if engine.id in seen.hosts):
        found.append(f"{_names(held)} {EngineState.BEHIND}: {held[0]} {seen.hosts[held[0]]}")
    if gave_up:
        found.append(f"{_names(gave_up)} not brought to it again: loads of it failed too often")
    if later:
        why = why_waiting(seen.strategy, seen.target, seen.engines)
        found.append(f"{_names(later)} next: {why}")
    return found


def runs_of(store: Store) -> list[str]:
    """Return the runs that anything is known of, closed ones last."""
    there = {run for run in store.index.runs if store.runs.begins(run, store.index.newest_of(run)) is None}
    runs = there | store.runs.followed_since.keys()
    return sorted(runs, key=lambda run: (run in store.runs.closed, run))


def glance_at(store: Store, targets: Targets, run: str) -> RunGlance:
    engines, any_, words = store.engines_of(run), store.runs.upstream, host_words()
    upstream = upstream_of(store, run)
    return glance(
        RunFacts(
            run=run,
            target=targets.of_run(run).target,
            versions=[version.as_judged for version in store.published_of(run)],
            engines=engines,
            update=store.updates.get(run),
            strategy=targets.strategy,
            others=[] if engines else list(store.engines.values()),
            closed=store.runs.closed.keys(),
            closed_at=store.runs.closed.get(run),
            upstream=upstream,
            elsewhere=None if any_ is None or upstream is not None else any_.not_brought(run),
            loadable=targets.of_run(run).loadable,
            began=run in store.index.newest_ever,
            hosts={engine.id: does for engine in engines if (does := words.does(engine, store)) is not None},
            unknown={each.id: has for each in engines if (has := words.unknown(each, store, targets)) is not None},
        )
    )


def explain_run(seen: RunGlance, target: str | None) -> list[str]:
    """Explain how a run stands; the explanation of `target`, its target, follows."""
    reasons = (reason if reason.endswith(".") else f"{reason}." for reason in seen.reasons)
    lacks = f"It has no target: 'refitd versions --run {seen.run}' lists its versions."
    aims = lacks if target is None else f"{target} is its target."
    return [f"Run {seen.run} is {seen.standing}: {seen.headline}", *of_its_run(reasons, seen.run), aims]


def of_its_run(sentences: Iterable[str], run: str) -> list[str]:
    """What is said of a run and its versions within the run's own explanation, which it does not name again."""
    itself = f": 'refitd explain {run}' says "
    said = (each.replace(f"{itself}how to bring one here, or ", ": bring one here, or ") for each in sentences)
    return [each.replace(f"{itself}what to do.", ".") for each in said]
