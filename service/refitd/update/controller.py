"""The updates of all runs: which version each run is on its way to, and whether it has arrived.

The controller decides nothing about single engines: reconcilers take the target from the same records by themselves. It
binds engines to runs, records an update for each change of target and marks versions as served.

The lease that a service asks plugins for: as long as it takes to look at all of its engines some times.
"""

from dataclasses import replace
from pathlib import Path

import structlog

from refitd.engine.plugin.client import Leads, leads_of, leads_of_group
from refitd.policy.next_action import at_rest_interval
from refitd.policy.roster import bind, follows, why_unbound
from refitd.policy.strategy import fault_found, is_through
from refitd.policy.traffic import is_proven
from refitd.state.records import EngineRecord, UpdateRecord
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.update.targets import Targets
from refitd_client.contract.states import EngineState, UpdateState


class UpdateController:
    """Makes bindings and updates current at each change in the store, until cancelled."""

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
        """Make bindings and updates current, once."""
        runs = set(self._store.index.runs)
        for known in list(self._store.engines.values()):
            if known.run is None or (self._default_run not in (None, known.run) and not known.naming.run_named):
                engine, choice = follows(known, None, named=False), runs - self._store.runs.closed.keys()
                run = bind(engine.run, self._default_run, choice)
                if run is not None:
                    self._store.put_engine(follows(engine, run, named=False), f"follows run {run}")
                elif choice and engine.reason != (why := why_unbound(choice)):
                    self._store.put_engine(engine.having(reason=why))
        for run in sorted(runs):
            self._advance(run)

    def _advance(self, run: str) -> None:
        target = self._targets.of_run(run).target
        update = self._store.updates.get(run)
        if target is None:
            # With nothing to go back to, no other one begins. One that has arrived is not on its way again: where an
            # upstream bars all that it has, a follower's engines stay where they are.
            if update is not None and not update.state.is_proven and self._is_barred(update):
                self._close(update, UpdateState.ROLLED_BACK)
            return
        if update is None or update.version != target.id:
            cause = "newest good version" if update is None else self._end(update, target)
            update = self._store.start_update(run, target.id, cause)
        engines = self._store.engines_of(run)
        fault = fault_found(self._targets.strategy, target, update, engines)
        if fault is not None:
            # The same as a rollback by hand: what is newer than the last good version is not gone to again.
            self._store.put_version(target.having(barred=True, reason=fault, given_up=fault), f"barred: {fault}")
            return
        state = self._state_of(update, target, engines)
        if state is not update.state:
            self._store.put_update(replace(update, state=state), f"update {update.number} to {target.id}: {state}")
        if target.served_at is None and state.is_proven:
            self._mark_served(target)

    def _end(self, current: UpdateRecord, target: VersionRecord) -> str:
        """Close the update that the target has moved away from; return why the next one begins."""
        left = self._store.versions.get(current.version)
        if self._is_barred(current):
            self._close(current, UpdateState.ROLLED_BACK)
            return f"rolled back from {current.version}"
        if current.state.is_under_way:
            backwards = left is None or left.order > target.order
            self._close(current, UpdateState.ABORTED if backwards else UpdateState.SUPERSEDED)
            # The target may have moved on between the last engine's proof and this look: then the version was served.
            engines = self._store.engines_of(current.run)
            if left is not None and left.served_at is None and self._state_of(current, left, engines).is_proven:
                self._mark_served(left)
        return "newest good version"

    def _is_barred(self, update: UpdateRecord) -> bool:
        version = self._store.versions.get(update.version)
        return version is not None and version.barred

    def _close(self, record: UpdateRecord, state: UpdateState) -> None:
        if record.state is state:
            return
        text = f"update {record.number} to {record.version} is {state}"
        self._store.put_update(replace(record, state=state), text)

    def _state_of(self, update: UpdateRecord, target: VersionRecord, engines: list[EngineRecord]) -> UpdateState:
        if not engines:  # nothing is on its way, and what was proved was proved
            return update.state if update.state.is_proven else UpdateState.PENDING
        through = is_through(self._targets.strategy, target, update)
        if through and is_proven(target.id, engines, self._quorum):
            degraded = any(not engine.state.is_waited_for for engine in engines)
            return UpdateState.DEGRADED if degraded else UpdateState.COMPLETE
        if update.state is UpdateState.PENDING and not any(e.state is EngineState.UPDATING for e in engines):
            return UpdateState.PENDING
        return UpdateState.ROLLING

    def _mark_served(self, target: VersionRecord) -> None:
        timings = dict(target.career.timings)
        for engine in self._store.engines.values():
            attempt = engine.trouble.last_attempt
            if attempt is not None and attempt.version == target.id:
                for stage, milliseconds in attempt.timings.items():
                    timings[stage] = max(milliseconds, timings.get(stage, 0.0))
        served = target.having(served_at=self._store.clock.now(), timings=timings)
        self._store.put_version(served, f"served: step {target.order.step} is proven on every reachable engine")


log = structlog.get_logger(__name__)


def service_leads(
    store: Store, root: Path, state_folder: Path, probe_interval: float, group: tuple[str, int] | None
) -> Leads | None:
    """Return the service's lease; without a name of its own it leads no engine, and all else works. Blocks.

    Args:
        store: has the engines.
        root: the folder of the service.
        state_folder: its own, with its name.
        probe_interval: seconds between two looks at an engine, as the operator wants.
        group: name and epoch of the group that the service leads; None where it is no part of one.
    """
    root = root.resolve()

    def apart() -> float:
        return at_rest_interval(probe_interval, len(store.engines))

    if group is not None:
        return leads_of_group(root, *group, probe_interval, apart)
    try:
        return leads_of(root, state_folder, probe_interval, apart)
    except OSError as error:
        log.warning("engines with the plugin are not told who leads them", reason=str(error))
        return None
