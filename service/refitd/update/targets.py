"""What each run's engines are to serve now. Remembered, and computed again when a change in the store can change it."""

from dataclasses import replace

from refitd.policy.goals import (
    LoadableDeltas,
    PendingOffer,
    as_ordered,
    goals_of_engine,
    goals_of_run,
    offered_to,
    takers,
)
from refitd.policy.next_action import Goals, at_rest
from refitd.policy.strategy import Strategy, StrategyName
from refitd.policy.traffic import Demand, shut
from refitd.state.observer import Notifier, Observer
from refitd.state.records import EngineRecord, UpdateRecord
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd_client.contract.states import VersionState

_ALL = Strategy()


class Targets(Observer):
    """The goals of runs and engines, from the strategy, the versions, the engines and the updates.

    What copies hold is read off the disk at each start, and what trainers offer from their memory ends with the
    service: neither is in the journal, and this object alone knows them.

    Attributes:
        follows: whether an upstream orders what is served here, instead of the newest version. Set it before the first
            question.
        strategy: how versions go to the engines of their run.
        changed: notified when a run's target, an engine's run or the set of engines changes.
        carriage: which deltas engines find in a copy, or why not.
        copying: ids of the versions that a copy is being made from.
    """

    def __init__(self, store: Store, strategy: Strategy = _ALL, *, follows: bool = False) -> None:
        """Observe the store before all other observers, since these ask for goals."""
        self.strategy = strategy
        self.follows = follows
        self.changed = Notifier()
        self.copying: frozenset[str] = frozenset()
        self._carried: dict[str, str] = {}
        self._refused: dict[str, str] = {}
        self.carriage = LoadableDeltas(self._carried, self._refused)
        self._store = store
        self._offers: dict[str, PendingOffer] = {}
        self._goals: dict[str, Goals] = {}
        self._restless: tuple[float, int] | None = None
        self._paused = {update.run: update.paused_since is not None for update in store.updates.values()}
        store.observe(self, first=True)

    def of_run(self, run: str) -> Goals:
        """What the run's engines are to serve. Every engine's task asks at every turn, so it is remembered."""
        if run not in self._goals:
            known = self._store.versions_of(run)
            if self.follows:
                known = as_ordered(known, self._store.runs.ordered.get(run), self._store.engines_of(run))
            looked_at = [*known[:1], *(version for version in known[1:] if _may_be_aimed_at(version))]
            goals = goals_of_run(
                self.strategy, self._store.updates.get(run), looked_at, self._store.engines_of(run), self.carriage
            )
            self._goals[run] = replace(goals, ordered=self.follows)
        return self._goals[run]

    def with_lost(self, run: str) -> list[VersionRecord]:
        """What a run's goals are chosen from, and what was lost and is deleted here: an object store may have it."""
        known = self._store.index.lost_too_of(run)
        if not self.follows:
            return known
        return as_ordered(known, self._store.runs.ordered.get(run), self._store.engines_of(run))

    def of_engine(self, engine: EngineRecord) -> Goals:
        if engine.run is None:
            return Goals()
        store = self._store
        update = store.updates.get(engine.run)
        engines = [] if self.strategy.name is StrategyName.ALL else store.engines_of(engine.run)
        offer = self._offers.get(engine.run)
        return goals_of_engine(self.of_run(engine.run), engine, self.strategy, update, engines, store.versions, offer)

    def target_of(self, run: str | None) -> VersionRecord | None:
        return None if run is None else self.of_run(run).target

    def restless(self) -> int:
        """How many engines are not at rest, as of the last second: in an update each of them asks."""
        now = self._store.clock.monotonic()
        if self._restless is None or now - self._restless[0] >= 1.0:
            targets = {run: self.target_of(run) for run in {engine.run for engine in self._store.engines.values()}}
            ids = {run: None if target is None else target.id for run, target in targets.items()}
            count = sum(not at_rest(engine, ids[engine.run]) for engine in self._store.engines.values())
            self._restless = now, count
        return self._restless[1]

    def order(self, run: str, version: str | None) -> None:
        """Bring the run's engines to a version that the upstream wants and that is good here; None leaves them."""
        known = self._store.runs.record_of(run)
        if known.ordered != version:
            what = "engines stay where they are" if version is None else f"{version} is good here, and engines load it"
            self._store.put_order(replace(known, ordered=version), what)
            self._aim(run)

    def shut(self, engine: EngineRecord, demand: Demand) -> str | None:
        """Why no requests may go to an engine; None where they may."""
        target = self.of_run(engine.run).target if engine.run else None
        return shut(engine, self._store.versions.get(engine.serving or ""), target, demand)

    def carry(self, version: VersionRecord, path: str) -> None:
        if self._carried.get(version.id) != path:
            self._carried[version.id] = path
            self._refused.pop(version.id, None)
            self._carriage_changed(version.run)
            self._store.say("version", version.id, f"can be loaded from {path}")

    def let_go(self, version: str, run: str) -> None:
        """No copy holds a version any more, or will hold it in a moment: no engine begins to load it from here on."""
        if self._carried.pop(version, None) is not None:
            self._carriage_changed(run)

    def refuse(self, version: VersionRecord, reason: str) -> None:
        """No copy can hold a delta: engines stay on what they have until another version comes."""
        if self._refused.get(version.id) != reason:
            self._refused[version.id] = reason
            self._carriage_changed(version.run)
            text = f"cannot be carried out: {reason}"
            self._store.say("version", version.id, text, state=version.state.value)

    def _carriage_changed(self, run: str) -> None:
        self._aim(run)
        self._store.changed.notify()

    def copy_from(self, versions: frozenset[str]) -> None:
        """Copies are being made from these versions, and from no others."""
        self.copying = versions

    def offer(self, version: VersionRecord, path: str) -> None:
        """Offer engines a version that a trainer on their host has in memory, by the file at `path`."""
        known = self._offers.get(version.run)
        if known is not None and known.version == version.id:
            return  # engines that have answered are not asked again
        paused = _is_paused(self._store.updates.get(version.run))
        waiting = takers(self.strategy, self._store.engines_of(version.run), paused=paused)
        self._offers[version.run] = PendingOffer(version=version.id, path=path, waiting=waiting)
        self.changed.notify()

    def is_offered(self, version: VersionRecord) -> bool:
        """Whether an engine may yet take a version from its trainer's memory."""
        offer, store = self._offers.get(version.run), self._store
        if offer is None or offer.version != version.id:
            return False
        return any(offered_to(engine, offer, store.versions) is not None for engine in store.engines_of(version.run))

    def answered(self, engine: EngineRecord, version: VersionRecord) -> None:
        """An engine has taken what was offered, or has refused it."""
        offer = self._offers.get(version.run)
        if offer is not None and offer.version == version.id:
            self._offers[version.run] = offer.answered(engine.id)
            self._store.changed.notify()

    def version_changed(self, before: VersionRecord | None, after: VersionRecord) -> None:
        """Look at the run's goals again, where the version can be one."""
        if after.state is VersionState.DELETED:
            self._refused.pop(after.id, None)
        prepares = self._store.engines.plugged(after.run) > 0  # before the verdict
        if before is None or prepares or _may_be_aimed_at(before) or _may_be_aimed_at(after):
            self._aim(after.run)

    def engine_changed(self, before: EngineRecord | None, after: EngineRecord) -> None:
        """Look at the goals of the run that the engine follows again, and of the one that it has left."""
        if before is None or before.run != after.run:
            left = None if before is None else before.run
            self._take_turns(left)
            self._aim(left)
            self.changed.notify()
        self._take_turns(after.run)
        if before is None or self._matters(before, after):
            self._aim(after.run)

    def _matters(self, before: EngineRecord, after: EngineRecord) -> bool:
        """Whether the goals of a run can be others because of one engine: what engines hold stays the target when its
        files are lost. They are the same where others hold what it held and what it holds now: else each of a thousand
        engines that arrive would have its run's goals looked at again.
        """
        if before.run != after.run or (before.seen.plugin is None) is not (after.seen.plugin is None):
            return True
        engines, run = self._store.engines, after.run
        left = before.serving if before.known else None
        come = after.serving if after.known else None
        if left == come:
            return False
        return (left is not None and engines.serving(run, left) == 0) or engines.serving(run, come) == 1

    def engine_dropped(self, engine: EngineRecord) -> None:
        self._take_turns(engine.run)
        self._aim(engine.run)
        self.changed.notify()

    def update_changed(self, update: UpdateRecord) -> None:
        """The next engine may go, or none may while an operator has paused the run's updates."""
        self._take_turns(update.run)
        if self._paused.get(update.run, False) is not _is_paused(update):
            self._paused[update.run] = _is_paused(update)
            self.changed.notify()

    def _aim(self, run: str | None) -> None:
        """Look at a run's goals again, and notify if they have changed."""
        if run is not None:
            before = self._goals.pop(run, None)
            if before is None or before != self.of_run(run):
                self.changed.notify()

    def _take_turns(self, run: str | None) -> None:
        """Where engines go one after the other, each step of one may be another one's turn."""
        if self.strategy.name is not StrategyName.ALL:
            self._aim(run)
            self.changed.notify()


def _is_paused(update: UpdateRecord | None) -> bool:
    return update is not None and update.paused_since is not None


def _may_be_aimed_at(version: VersionRecord) -> bool:
    """Whether a version can be a goal of its run: it was found good, or was handed over from its trainer's memory."""
    return version.state.may_be_target or version.handed
