"""The rollouts of all runs: which version each run is on its way to, and whether it has arrived.

The controller decides nothing about single engines: reconcilers take the target from the same records by themselves. It
binds engines to runs, keeps the books (a rollout for each change of target) and marks versions as served.
"""

from dataclasses import replace

from refitd.policy.binding import bind, why_unbound
from refitd.policy.moving import follows
from refitd.policy.served import is_proven
from refitd.policy.strategy import fault_found, is_through
from refitd.rollout.targets import Targets
from refitd.state.records import EngineRecord, RolloutRecord
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd_client.contract.states import EngineState, RolloutState

_LEFT_BEHIND = frozenset({EngineState.UNREACHABLE, EngineState.QUARANTINED, EngineState.CONTESTED})
_PROVEN = frozenset({RolloutState.COMPLETE, RolloutState.DEGRADED})


class RolloutController:
    """Brings bindings and rollouts up to date at each change in the store, until cancelled."""

    def __init__(self, store: Store, targets: Targets, *, default_run: str | None, quorum: int) -> None:
        self._store = store
        self._targets = targets
        self._default_run = default_run
        self._quorum = quorum

    async def run(self) -> None:
        """Look at each change in the store."""
        seen = -1
        while True:
            seen = await self._store.changed.wait_after(seen)
            self.look()

    def look(self) -> None:
        """Bring bindings and rollouts up to date, once."""
        runs = set(self._store.runs_with_versions)
        for engine in list(self._store.engines.values()):
            if engine.run is None or (self._default_run not in (None, engine.run) and not engine.run_named):
                self._bind(follows(engine, None, named=False), runs - self._store.runs.closed.keys())
        for run in sorted(runs):
            self._advance(run)

    def _bind(self, engine: EngineRecord, runs: set[str]) -> None:
        run = bind(engine.run, self._default_run, runs)
        if run is not None:
            self._store.put_engine(follows(engine, run, named=False), f"follows run {run}")
        elif runs and engine.reason != (why := why_unbound(runs)):
            self._store.put_engine(replace(engine, reason=why))

    def _advance(self, run: str) -> None:
        target = self._targets.of_run(run).target
        if target is None:
            return
        rollout = self._rollout_to(run, target)
        engines = self._store.engines_of(run)
        fault = fault_found(self._targets.strategy, target, rollout, engines)
        if fault is not None:
            # The same as a rollback by hand: what is newer than the last good version is not gone to again.
            self._store.put_version(replace(target, barred=True, reason=fault), f"barred: {fault}")
            return
        state = self._state_of(rollout, target, engines)
        if state is not rollout.state:
            self._store.put_rollout(replace(rollout, state=state), f"rollout {rollout.number} to {target.id}: {state}")
        if target.served_at is None and state in _PROVEN:
            self._mark_served(target)

    def _rollout_to(self, run: str, target: VersionRecord) -> RolloutRecord:
        current = self._store.rollouts.get(run)
        if current is not None and current.version == target.id:
            return current
        cause = "newest good version"
        if current is not None:
            cause = self._end(current, target)
        return self._store.start_rollout(run, target.id, cause)

    def _end(self, current: RolloutRecord, target: VersionRecord) -> str:
        """Close the rollout that the target has moved away from; return why the next one begins."""
        left = self._store.versions.get(current.version)
        if left is not None and left.barred:
            self._store.end_rollout(current, RolloutState.ROLLED_BACK)
            return f"rolled back from {current.version}"
        if current.state in {RolloutState.PENDING, RolloutState.ROLLING}:
            backwards = left is None or left.order > target.order
            self._store.end_rollout(current, RolloutState.ABORTED if backwards else RolloutState.SUPERSEDED)
            self._mark_overtaken(current, left)
        return "newest good version"

    def _mark_overtaken(self, current: RolloutRecord, left: VersionRecord | None) -> None:
        """The target may have moved on between the last engine's proof and this look: the version was served."""
        if left is None or left.served_at is not None:
            return
        if self._state_of(current, left, self._store.engines_of(left.run)) in _PROVEN:
            self._mark_served(left)

    def _state_of(self, rollout: RolloutRecord, target: VersionRecord, engines: list[EngineRecord]) -> RolloutState:
        if not engines:  # nothing is on its way, and what was proved was proved
            return rollout.state if rollout.state in _PROVEN else RolloutState.PENDING
        through = is_through(self._targets.strategy, target, rollout)
        if through and is_proven(target.id, engines, self._quorum):
            degraded = any(engine.state in _LEFT_BEHIND for engine in engines)
            return RolloutState.DEGRADED if degraded else RolloutState.COMPLETE
        if rollout.state is RolloutState.PENDING and not any(e.state is EngineState.UPDATING for e in engines):
            return RolloutState.PENDING
        return RolloutState.ROLLING

    def _mark_served(self, target: VersionRecord) -> None:
        timings = dict(target.timings)
        for engine in self._store.engines.values():
            attempt = engine.last_attempt
            if attempt is not None and attempt.version == target.id:
                for stage, milliseconds in attempt.timings.items():
                    timings[stage] = max(milliseconds, timings.get(stage, 0.0))
        served = replace(target, served_at=self._store.clock.now(), timings=timings)
        self._store.put_version(served, f"served: step {target.order.step} is proven on every reachable engine")
