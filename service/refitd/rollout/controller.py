"""The rollouts of all runs: which version each run is on its way to, and whether it has arrived.

The controller decides nothing about single engines: reconcilers take the target from the same records by themselves. It
binds engines to runs, records a rollout for each change of target and marks versions as served.
"""

from dataclasses import replace

from refitd.policy.binding import bind, follows, why_unbound
from refitd.policy.served import NOT_WAITED_FOR, is_proven
from refitd.policy.strategy import fault_found, is_through
from refitd.rollout.targets import Targets
from refitd.state.records import EngineRecord, RolloutRecord
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd_client.contract.states import EngineState, RolloutState

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
        runs = set(self._store.index.runs)
        for known in list(self._store.engines.values()):
            if known.run is None or (self._default_run not in (None, known.run) and not known.run_named):
                engine, choice = follows(known, None, named=False), runs - self._store.runs.closed.keys()
                run = bind(engine.run, self._default_run, choice)
                if run is not None:
                    self._store.put_engine(follows(engine, run, named=False), f"follows run {run}")
                elif choice and engine.reason != (why := why_unbound(choice)):
                    self._store.put_engine(replace(engine, reason=why))
        for run in sorted(runs):
            self._advance(run)

    def _advance(self, run: str) -> None:
        target = self._targets.of_run(run).target
        rollout = self._store.rollouts.get(run)
        if target is None:
            # With nothing to go back to, no other one begins. One that has arrived is not on its way again: where an
            # upstream bars all that it has, a follower's engines stay where they are.
            if rollout is not None and rollout.state not in _PROVEN and self._is_barred(rollout):
                self._close(rollout, RolloutState.ROLLED_BACK)
            return
        if rollout is None or rollout.version != target.id:
            cause = "newest good version" if rollout is None else self._end(rollout, target)
            rollout = self._store.start_rollout(run, target.id, cause)
        engines = self._store.engines_of(run)
        fault = fault_found(self._targets.strategy, target, rollout, engines)
        if fault is not None:
            # The same as a rollback by hand: what is newer than the last good version is not gone to again.
            self._store.put_version(replace(target, barred=True, reason=fault, given_up=fault), f"barred: {fault}")
            return
        state = self._state_of(rollout, target, engines)
        if state is not rollout.state:
            self._store.put_rollout(replace(rollout, state=state), f"rollout {rollout.number} to {target.id}: {state}")
        if target.served_at is None and state in _PROVEN:
            self._mark_served(target)

    def _end(self, current: RolloutRecord, target: VersionRecord) -> str:
        """Close the rollout that the target has moved away from; return why the next one begins."""
        left = self._store.versions.get(current.version)
        if self._is_barred(current):
            self._close(current, RolloutState.ROLLED_BACK)
            return f"rolled back from {current.version}"
        if current.state in {RolloutState.PENDING, RolloutState.ROLLING}:
            backwards = left is None or left.order > target.order
            self._close(current, RolloutState.ABORTED if backwards else RolloutState.SUPERSEDED)
            # The target may have moved on between the last engine's proof and this look: then the version was served.
            engines = self._store.engines_of(current.run)
            if left is not None and left.served_at is None and self._state_of(current, left, engines) in _PROVEN:
                self._mark_served(left)
        return "newest good version"

    def _is_barred(self, rollout: RolloutRecord) -> bool:
        version = self._store.versions.get(rollout.version)
        return version is not None and version.barred

    def _close(self, record: RolloutRecord, state: RolloutState) -> None:
        if record.state is state:
            return
        text = f"rollout {record.number} to {record.version} is {state}"
        self._store.put_rollout(replace(record, state=state), text)

    def _state_of(self, rollout: RolloutRecord, target: VersionRecord, engines: list[EngineRecord]) -> RolloutState:
        if not engines:  # nothing is on its way, and what was proved was proved
            return rollout.state if rollout.state in _PROVEN else RolloutState.PENDING
        through = is_through(self._targets.strategy, target, rollout)
        if through and is_proven(target.id, engines, self._quorum):
            degraded = any(engine.state in NOT_WAITED_FOR for engine in engines)
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
