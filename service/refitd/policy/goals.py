"""What a run's engines are to serve, and how far each of them may go now. Pure: records in, goals out.

The newest wins, by (generation, step) and never by clocks. A version that was rolled back from is barred. A step of an
older generation is never newer than one of the current, whenever it was written. A delta that no copy can hold is
skipped: engines stay on what they have until another version comes.

Beside the target, an engine may work on a version that has no verdict yet. An engine with the plugin prepares a version
while it serves, and writes nothing; the load waits for the verdict. A trainer on the engine's host may offer a version
from its memory, before its files are there. The offer is in memory alone, and good until every engine that could take
it
has answered. After that, and after a restart of the service, the version comes by its files like any other.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from refitd.policy.chain import Versions, is_past, step_in_place
from refitd.policy.next_action import Goals, RefitTo, is_to_be_left
from refitd.policy.strategy import Strategy, StrategyName, finished_first, has_given_up, released
from refitd.state.records import EngineRecord, UpdateRecord
from refitd.state.version import VersionRecord
from refitd_client.contract.states import Kind, VersionState


@dataclass(frozen=True, slots=True)
class LoadableDeltas:
    """`carried` maps the ids of deltas to the paths of copies that hold them, `refused` to the reason why none can.

    A delta that neither names waits for a copy.
    """

    carried: Mapping[str, str] = field(default_factory=dict[str, str])
    refused: Mapping[str, str] = field(default_factory=dict[str, str])

    def can_load(self, version: VersionRecord) -> bool:
        return version.kind is not Kind.DELTA or version.id in self.carried

    def is_refused(self, version: VersionRecord) -> bool:
        """Whether it cannot be carried out: engines stay on what they have until something else comes."""
        return version.id in self.refused

    def path_of(self, version: VersionRecord) -> str | None:
        """Where engines find its files, None where they find none now."""
        return version.path if version.kind is not Kind.DELTA else self.carried.get(version.id)


NOTHING = LoadableDeltas()


def choose_target(
    versions: Iterable[VersionRecord],
    finish: str | None = None,
    held: Collection[str] = (),
    carriage: LoadableDeltas = NOTHING,
) -> VersionRecord | None:
    """The version that the engines of a run are to serve, None while there is none that is good.

    A version that was served, or that engines hold (`held`), stays the target when its files are lost: engines do not
    go
    backwards because of that. A version that engines took from their trainer's memory is the target while an engine
    holds
    it: no other could get there. `finish` names one that stays the target as long as it can be loaded.
    """
    good = [version for version in versions if _is_good(version, held, carriage) and not version.barred]
    # Engines that do not serve the version to be finished must still be able to get there.
    sealed = [version for version in good if version.state is VersionState.SEALED and not carriage.is_refused(version)]
    unfinished = [version for version in sealed if version.id == finish]
    return max(unfinished or good, key=lambda version: version.order, default=None)


def _is_good(version: VersionRecord, held: Collection[str], carriage: LoadableDeltas) -> bool:
    was_taken = version.served_at is not None or version.id in held
    if version.state is VersionState.SEALED:
        return was_taken or not carriage.is_refused(version)
    if version.in_memory:
        return version.id in held
    return version.state is VersionState.LOST and was_taken


def as_ordered(
    versions: Sequence[VersionRecord], ordered: str | None, engines: Iterable[EngineRecord]
) -> list[VersionRecord]:
    """What may be a goal on a host that follows an upstream: the version that was ordered, and older versions that the
    upstream has had it serve before. What else was pulled waits for its order.

    A version counts as served before also while a single engine serves it. Where the upstream bars the version that was
    ordered, the last version that all engines served may be older than what that engine serves: it would go back.
    """
    last = next((version for version in versions if version.id == ordered), None)
    if last is None:
        return []
    held = {engine.serving for engine in engines if engine.known}
    return [last, *(v for v in versions if v.order < last.order and (v.served_at is not None or v.id in held))]


def wanted(
    versions: Iterable[VersionRecord], finish: str | None = None, carriage: LoadableDeltas = NOTHING
) -> VersionRecord | None:
    """The version to have ready for engines: the target, unless its files are lost. A delta needs a copy first."""
    sealed = (version for version in versions if version.state is VersionState.SEALED and not version.barred)
    good = (version for version in sealed if carriage.can_load(version) or not carriage.is_refused(version))
    return max(good, key=lambda version: (version.id == finish, version.order), default=None)


def loadable(
    versions: Iterable[VersionRecord], finish: str | None = None, carriage: LoadableDeltas = NOTHING
) -> VersionRecord | None:
    """The newest version that an engine can be brought to now: what is wanted, or one before it while that waits for a
    copy. One after it would take the engine past a version that is to be finished first, which then never is.
    """
    known = list(versions)
    goal = wanted(known, finish, carriage)
    if goal is None:
        return None
    return wanted((v for v in known if v.order <= goal.order and carriage.can_load(v)), finish, carriage)


def last_good(versions: Iterable[VersionRecord], carriage: LoadableDeltas | None = None) -> VersionRecord | None:
    """The newest version that was served before; with `carriage`, that an engine can be brought back to at once."""
    sealed = (v for v in versions if v.state is VersionState.SEALED and (carriage is None or carriage.can_load(v)))
    good = (version for version in sealed if version.served_at is not None)
    return max((v for v in good if not v.barred), key=lambda version: version.order, default=None)


def last_good_before(versions: Iterable[VersionRecord], current: VersionRecord) -> VersionRecord | None:
    """Where a rollback from `current` goes: the newest version before it that engines have served."""
    return last_good(version for version in versions if version.order < current.order)


def unserved_before(versions: Iterable[VersionRecord], current: VersionRecord) -> list[VersionRecord]:
    """Where a rollback could go besides: good versions before `current` that no engine has proved, newest first."""
    good = (v for v in versions if v.state is VersionState.SEALED and not v.barred and v.served_at is None)
    return sorted((v for v in good if v.order < current.order), key=lambda version: version.order, reverse=True)


def to_bar(versions: Sequence[VersionRecord], goal: VersionRecord) -> list[VersionRecord]:
    """What a rollback bars: all that is newer than its goal, so that the goal becomes the newest."""
    return [version for version in versions if version.order > goal.order and not version.barred]


def is_here(newest: VersionRecord | None, target: VersionRecord | None) -> bool:
    """Whether a good version is here that is newer than what this host's engines should serve."""
    if newest is None or newest.barred or newest.state is not VersionState.SEALED:
        return False
    return target is None or newest.order > target.order


def passed_over(versions: Iterable[VersionRecord], target: VersionRecord | None) -> VersionRecord | None:
    """The newest good version that appeared after a later step of its generation, which is the target still; None where
    there is none. A training may have begun again, or somebody has copied an old step: only an operator knows.
    """
    known = list(versions)
    newest = max(known, key=lambda version: version.order, default=None)
    if target is None or newest is None:
        return None
    asked = (v for v in known if v.announced.after == newest.id and v.state is VersionState.SEALED and not v.barred)
    late = (version for version in asked if version.served_at is None and version.order < target.order)
    return max(late, key=lambda version: version.order, default=None)


def question_about(version: VersionRecord, target: VersionRecord) -> str:
    """What an operator is asked about a version that is passed over so, as a sentence without its end."""
    late = f"step {version.order.step:,} appeared after step {target.order.step:,}, which stays the target"
    command = f"'refitd rollback {version.run} --to {version.id}'"
    return f"{late}: if a new training began, {command} goes there; if not, move {version.path} away"


def skipped_between(
    versions: Iterable[VersionRecord], serving: VersionRecord | None, target: VersionRecord
) -> list[VersionRecord]:
    """The good versions that an engine passes over when it goes straight from what it serves to the target."""
    if serving is None or serving.run != target.run:
        return []
    return [v for v in versions if v.state is VersionState.SEALED and serving.order < v.order < target.order]


def goals_of_run(
    strategy: Strategy,
    update: UpdateRecord | None,
    versions: Sequence[VersionRecord],
    engines: Sequence[EngineRecord],
    carriage: LoadableDeltas = NOTHING,
) -> Goals:
    held = {engine.serving for engine in engines if engine.known and engine.serving is not None}
    finish = _in_progress(finished_first(strategy, update, engines), versions, held)
    return Goals(
        target=choose_target(versions, finish, held, carriage),
        wanted=wanted(versions, finish, carriage),
        loadable=loadable(versions, finish, carriage),
        last_good=last_good(versions, carriage),
        last_served=last_good(versions),
        coming=coming(versions, engines),
    )


def _in_progress(finish: str | None, versions: Sequence[VersionRecord], held: Collection[str]) -> str | None:
    """The version that is finished first; None where an engine serves a newer good one.

    No engine goes back to an older version, so that would never end. It comes about where a lost journal is rebuilt,
    and
    where files are lost while they are loaded.
    """
    for version in versions:  # the newest first
        if version.id == finish:
            return finish
        if version.id in held and version.state.may_be_target and not version.barred:
            return None
    return finish


def goals_of_engine(
    run: Goals,
    engine: EngineRecord,
    strategy: Strategy,
    update: UpdateRecord | None,
    engines: Sequence[EngineRecord],
    versions: Versions,
    offer: "PendingOffer | None" = None,
) -> Goals:
    """What one engine is to do: its run's goals, as far as it may go there now."""
    serves, engine = engine, engine.to_load
    goal, good = run.loadable, run.last_good
    # An engine with the plugin is given deltas themselves, also where others wait for a copy.
    if run.wanted is not None and step_in_place(engine, run.wanted, versions) is not None:
        goal = run.wanted
    if run.last_served is not None and _goes_back_in_place(engine, run.last_served, versions):
        good = run.last_served
    # It goes no further than the last good version while it is not its turn.
    waits = run.target is not None and _waits(run, run.target, goal, good, engine, strategy, update, engines)
    goal = good if waits else goal
    # A host that proves nothing, since an engine of it was restarted, is mended where it was last, also while it is not
    # its turn: the last good version would take all of its engines back.
    there = versions.get(engine.contents.held or "")
    if there is not None and goal is not None and _is_mended_at(there, engine, goal, run.target):
        goal = there
    is_ordered = run.ordered and (not waits or good == run.target)
    if _would_go_back(serves, goal, run.target if is_ordered else None, versions):
        goal = _again(versions[serves.serving or ""], run, pulls=serves.pulls)
    # An engine that gets to a delta by steps goes to the next one, where it may go there.
    elif (step := None if goal is None else step_in_place(engine, goal, versions)) is not None:
        goal = good if good is not None and has_given_up(engine, step) else step
    # Beside that it makes ready what is still being checked, or takes what a trainer offers.
    paused = update is not None and update.paused_since is not None
    next_one = versions.get(run.coming or "")
    is_ahead = next_one is not None and looks_ahead(engine, next_one, versions, strategy, paused=paused)
    taken = offered_to(serves, offer, versions)
    return replace(
        run,
        loadable=goal,
        last_good=good,
        ordered=is_ordered,
        coming=run.coming if is_ahead else None,
        serving=versions.get(engine.serving or ""),
        offered=None if taken is None else RefitTo(versions[taken.version], taken.path),
    )


def _would_go_back(
    engine: EngineRecord, goal: VersionRecord | None, ordered: VersionRecord | None, versions: Versions
) -> bool:
    """Whether an engine that is to be loaded again would be loaded with something older than it serves. `ordered`: what
    an upstream has ordered, for which engines go back.
    """
    has = versions.get(engine.serving or "")
    if goal is None or has is None or not engine.debts.reload or is_to_be_left(has) or goal.run != has.run:
        return False
    return goal.order < has.order and (ordered is None or ordered.order >= has.order)


def _again(has: VersionRecord, run: Goals, *, pulls: bool) -> VersionRecord | None:
    """What an engine is loaded with that is to be loaded again, and that may go to nothing newer now: what it serves,
    where that can be loaded in one piece. Else None: it stays as it is until there is something.
    """
    is_whole = has.kind is Kind.FULL or has == run.loadable or pulls
    return has if has.state is VersionState.SEALED and is_whole else None


def _goes_back_in_place(engine: EngineRecord, good: VersionRecord, versions: Versions) -> bool:
    """Whether the plugin can bring an engine back to a version for which others would wait."""
    step = good if engine.serving == good.id else step_in_place(engine, good, versions)
    return step is not None and not has_given_up(engine, good) and not has_given_up(engine, step)


def _waits(
    run: Goals,
    target: VersionRecord,
    goal: VersionRecord | None,
    good: VersionRecord | None,
    engine: EngineRecord,
    strategy: Strategy,
    update: UpdateRecord | None,
    engines: Sequence[EngineRecord],
) -> bool:
    """Whether an engine goes no further than the last good version: while it is not its turn, once it has given a
    version up, and while an operator has paused the run's updates. Engines that were restarted or broke get the last
    good
    version.
    """
    if update is not None and update.paused_since is not None and not engine.serves_newer_than(target):
        return True
    if goal is not None and good is not None and has_given_up(engine, goal):
        return True
    if strategy.name is StrategyName.ALL:
        return False  # as `released` says, without a look at a thousand engines for each of them
    if strategy.name is StrategyName.CANARY and goal not in (target, good):
        return True  # where the target's files are lost, no canary went before
    return engine.id not in released(strategy, target, update, engines, goal, run.loadable)


def _is_mended_at(
    there: VersionRecord, engine: EngineRecord, goal: VersionRecord, target: VersionRecord | None
) -> bool:
    if not engine.pulls or not engine.known or engine.serving is not None:
        return False
    if there.barred or there.state is not VersionState.SEALED or has_given_up(engine, there):
        return False
    return target is not None and there.run == target.run and goal.order < there.order <= target.order


def coming(versions: Iterable[VersionRecord], engines: Iterable[EngineRecord]) -> str | None:
    """The id of a run's newest version, if engines with the plugin can prepare it while it waits for its verdict."""
    if all(engine.seen.plugin is None for engine in engines):
        return None
    newest = max(versions, key=lambda version: version.order, default=None)
    if newest is None or not newest.state.is_open or newest.barred or newest.handed:
        return None
    return newest.id if newest.announced.noticed or newest.state is VersionState.VALIDATING else None


def looks_ahead(
    engine: EngineRecord, version: VersionRecord, versions: Versions, strategy: Strategy, *, paused: bool
) -> bool:
    """Whether an engine would load a version at once if it were found good now, and so prepares it."""
    if strategy.name is not StrategyName.ALL or paused:
        return False
    if engine.seen.plugin is None or not engine.known or not engine.state.is_at_rest:
        return False
    if is_past(engine, version, versions):
        return False
    return version.kind is Kind.FULL or step_in_place(engine, version, versions) == version


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingOffer:
    """A version offered from its trainer's memory: the offer's file, relative to the root, and who may take it."""

    version: str
    path: str
    waiting: frozenset[str]

    def answered(self, engine: str) -> "PendingOffer":
        return replace(self, waiting=self.waiting - {engine})


def takers(strategy: Strategy, engines: Iterable[EngineRecord], *, paused: bool) -> frozenset[str]:
    """The ids of the engines that an offer is for. Where engines go one after the other all wait for the files: the
    trainer does not wait for a canary's check, nor for an operator.
    """
    if strategy.name is not StrategyName.ALL or paused:
        return frozenset()
    return frozenset(engine.id for engine in engines if _can_take(engine))


def offered_to(
    engine: EngineRecord, offer: PendingOffer | None, versions: Mapping[str, VersionRecord]
) -> PendingOffer | None:
    """The offer, if this engine is to take it or takes it now, else None. While there is such an engine the trainer
    must
    not change its tensors.
    """
    version = None if offer is None else versions.get(offer.version)
    if offer is None or version is None or engine.id not in offer.waiting or not _can_take(engine):
        return None
    if not version.state.is_open or version.barred:
        return None
    return None if is_past(engine, version, versions) else offer


def _can_take(engine: EngineRecord) -> bool:
    return engine.seen.takes_offers and engine.known and not (engine.state.is_out_of_reach or engine.state.stays_paused)
