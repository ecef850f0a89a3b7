"""The updates of all runs: which version each run is on its way to, and whether it has arrived.

The controller decides nothing about single engines: reconcilers take the target from the same records by themselves. It
binds engines to runs, records an update for each change of target and marks versions as served.

The first engine that serves a version, the canary, answers for it before the others get it. refitd's own part of that
is a trial: a few tokens, asked for as a rollout would, with a finite log-probability each and the label of the version.
The operator's part is a URL that gets a POST about the canary and answers yes (2xx) or no (4xx).
"""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import httpx
import structlog

from refitd.engine.plugin import LEASE_SECONDS, PROBES, Leads, service_name
from refitd.policy.next_action import at_rest_interval
from refitd.policy.roster import bind, follows, why_unbound
from refitd.policy.strategy import awaits_check, fault_found, is_through
from refitd.policy.traffic import is_proven
from refitd.state.records import CheckState, EngineRecord, UpdateRecord
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.text import one_line, without_secrets, without_secrets_of
from refitd.update.targets import Targets
from refitd_client.contract.plugin import Owner
from refitd_client.contract.states import EngineState, UpdateState
from refitd_client.http.connection import IDENTITY


class UpdateController:
    """Makes bindings and updates current at each change in the store, until cancelled."""

    def __init__(self, store: Store, targets: Targets, *, default_run: str | None, quorum: int) -> None:
        self._store = store
        self._targets = targets
        self._default_run = default_run
        self._quorum = quorum

    async def run(self) -> None:
        seen = -1
        while True:
            seen = await self._store.changed.wait_after(seen)
            self.look()

    def look(self) -> None:
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
    """Return the service's lease; without a name of its own it leads no engine, and all else works. Blocks. `group`:
    name and epoch of the group that the service leads; None where it is no part of one.
    """

    def lasts() -> float:
        return max(LEASE_SECONDS, PROBES * at_rest_interval(probe_interval, len(store.engines)))

    try:
        name, epoch = group or (service_name(state_folder), 0)
    except OSError as error:
        log.warning("engines with the plugin are not told who leads them", reason=str(error))
        return None
    host, pid = socket.gethostname(), os.getpid()
    return Leads(owner=Owner(service=name, root=str(root.resolve()), host=host, pid=pid, epoch=epoch), lasts=lasts)


CANARY_SECONDS = 600.0  # an operator's check may run a small evaluation
CANARY_RETRY_SECONDS = 1.0
_ANSWER_SHOWN = 200  # characters of an answer
_ANSWER_READ = 2**16  # bytes of it

Tell = Callable[[str], None]
CanaryCheck = Callable[[VersionRecord, EngineRecord, Tell], Awaitable[str | None]]
"""Returns why the canary is bad, None where it is good; meanwhile it reports what it waits for."""


class CanaryChecks:
    """Checks canaries once they serve a version, until cancelled. `checks` run in order, up to the first fault.

    Each run has a check of its own: one that takes minutes holds up no other run, and is cancelled when its version is
    not the one that engines go to any more.
    """

    def __init__(self, store: Store, targets: Targets, checks: list[CanaryCheck]) -> None:
        self._store = store
        self._targets = targets
        self._checks = checks
        self._asking: dict[tuple[str, int, str], asyncio.Task[None]] = {}  # by run, number of the update, version

    async def run(self) -> None:
        seen = -1
        async with asyncio.TaskGroup() as group:
            while True:
                seen = await self._store.changed.wait_after(seen)
                for key in [key for key in self._asking if not self._is_current(*key)]:
                    self._asking.pop(key).cancel()
                for update in list(self._store.updates.values()):
                    self._look(update, group)

    def _is_current(self, run: str, number: int, version: str) -> bool:
        update, target = self._store.updates.get(run), self._targets.of_run(run).target
        return update is not None and update.number == number and target is not None and target.id == version

    def _look(self, update: UpdateRecord, group: asyncio.TaskGroup) -> None:
        target = self._targets.of_run(update.run).target
        if target is None:
            return
        canary = awaits_check(self._targets.strategy, target, update, self._store.engines_of(update.run))
        key = (update.run, update.number, target.id)
        if canary is not None and key not in self._asking:
            asked = self._ask(target, canary, key)
            self._asking[key] = group.create_task(asked, name=f"check {target.id} on {canary.id}")

    async def _ask(self, target: VersionRecord, canary: EngineRecord, key: tuple[str, int, str]) -> None:
        def tell(trouble: str) -> None:
            update = self._store.updates.get(key[0])
            reason = f"the check of the canary {canary.id} has not come to an end: {trouble}; it is asked again"
            if update is not None and self._is_current(*key) and update.reason != reason:
                self._store.put_update(replace(update, reason=reason), reason)

        fault = None
        for check in self._checks:
            if (fault := await check(target, canary, tell)) is not None:
                break
        if self._asking.pop(key, None) is None or not self._is_current(*key):
            return  # rolled back or overtaken meanwhile
        now = self._store.engines.get(canary.id)
        if fault is not None and (now is None or now.serving != target.id):
            self._store.changed.notify()  # the canary went away: that says nothing of the version; the next is asked
            return
        update = self._store.updates[target.run]
        if fault is None:
            text = f"the canary {canary.id} passed its check with {update.version}: the others follow"
            self._store.put_update(replace(update, check=CheckState.PASSED, reason=None), text)
        else:
            reason = f"the canary {canary.id} failed its check: {fault}"
            self._store.put_update(replace(update, check=CheckState.FAILED, reason=reason), reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryQuestion:
    """The JSON body that an operator's check gets. `url` is the engine's."""

    run: str
    step: int
    version: str
    engine: str
    url: str


class OperatorCheck:
    """Asks the operator's URL. No redirects, no proxies from the environment; while it is down it is asked again.

    Reasons name the URL without user, password and query, and so does what they quote of the answers: they appear in
    the log and in the API.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._shown = without_secrets(url)

    async def __call__(self, version: VersionRecord, engine: EngineRecord, tell: Tell) -> str | None:
        question = CanaryQuestion(
            run=version.run, step=version.order.step, version=version.id, engine=engine.id, url=engine.url
        )
        trouble = "it did not answer"
        try:
            async with (
                asyncio.timeout(CANARY_SECONDS),
                httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=CANARY_SECONDS) as http,
            ):
                while True:
                    try:
                        async with http.stream("POST", self._url, json=asdict(question), headers=IDENTITY) as reply:
                            text = await _beginning(reply)
                    except httpx.HTTPError as error:
                        trouble = f"it cannot be asked: {self._quoted(str(error))}"
                    else:
                        if reply.is_success:
                            return None
                        trouble = f"it answered {reply.status_code}: {self._quoted(text)}"
                        if reply.is_client_error:
                            return f"{self._shown} says no: {trouble}"
                    tell(f"{self._shown}: {trouble}")
                    await asyncio.sleep(CANARY_RETRY_SECONDS)
        except TimeoutError:
            return f"{self._shown} said nothing within {CANARY_SECONDS:g} s: {trouble}"

    def _quoted(self, text: str) -> str:
        """The first characters of a server's or library's text, without secrets."""
        return one_line(without_secrets_of(self._url, text)[:_ANSWER_SHOWN])


async def _beginning(reply: httpx.Response) -> str:
    data = bytearray()
    async for piece in reply.aiter_raw():
        data += piece
        if len(data) >= _ANSWER_READ:
            break
    return data.decode(errors="replace")
