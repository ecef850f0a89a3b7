"""One engine, kept on its run's target: the shell around `next_action`. One task an engine, one action at a time.

The order of writes is the point. The intent to load is durable before the engine hears of it, so that a crash in the
middle is found at the next start and the engine counts as TAINTED; the outcome is written after the engine was resumed,
so that no journal write lengthens a pause.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Protocol, assert_never

from structlog.contextvars import bound_contextvars

from refitd.catalog.record import VersionRecord
from refitd.engine.port import Engine, Files, Offered, Outcome, Reached, Refit, Stage, Target
from refitd.journal.journal import JournalError
from refitd.ledger import Ledger
from refitd.rollout.backoff import backoff
from refitd.rollout.in_place import takes_in_place
from refitd.rollout.observe import Expected, after_probe, after_refit, standing
from refitd.rollout.plan import Agenda, Goals, Probe, RefitTo, Rest, Resume, next_action
from refitd.rollout.record import NOT_SENT, AttemptRecord, EngineRecord
from refitd.rollout.target import skipped_between
from refitd_client.contract.states import EngineState, Kind

_AWAY = frozenset({EngineState.PROBING, EngineState.UNREACHABLE})


class _RemovedError(Exception):
    """The engine is nobody's any more."""


class SeenPath(Protocol):
    """A version's path as the engine sees it, None for a delta that it does not take in place and no copy holds now."""

    def __call__(self, version: VersionRecord, *, in_place: bool = False) -> str | None: ...


class Check(Protocol):
    """Whether the files that an engine is about to read, or has read, are those that were found good."""

    async def __call__(self, version: VersionRecord, *, in_place: bool = False) -> bool: ...


class Replica:
    """Keeps one engine on its run's target until cancelled.

    `seen_path` gives a version's path as the engine sees it; `check` looks at
    the files right before a load and returns False (having marked the version LOST) when they are not what was sealed.
    `warm` has them read into memory where they may not be.
    """

    def __init__(
        self,
        engine_id: str,
        engine: Engine,
        ledger: Ledger,
        *,
        seen_path: SeenPath,
        check: Check,
        warm: Callable[[VersionRecord], Awaitable[None]],
        probe_interval: float,
        chance: random.Random,
    ) -> None:
        self.id = engine_id
        self._url = ledger.engines[engine_id].url
        self._engine = engine
        self._ledger = ledger
        self._seen_path = seen_path
        self._check = check
        self._warm = warm
        self._probe_interval = probe_interval
        self._chance = chance
        self._agenda = Agenda()
        self._stopping = False

    async def run(self) -> None:
        """Look, decide, act, until stopped, cancelled or the engine is removed."""
        with suppress(_RemovedError), bound_contextvars(engine=self.id):
            while not self._stopping:
                await self._turn()

    async def _turn(self) -> None:
        seen = self._ledger.targets.count
        action = next_action(self._record, self._goals(), self._agenda, self._now())
        match action:
            case Rest(until):
                await self._ledger.targets.after(seen, within=until - self._now())
            case Probe():
                await self._probe()
            case Resume():
                await self._resume()
            case RefitTo(version, offer):
                await (self._refit(version) if offer is None else self._take(version, offer))
            case _:
                assert_never(action)

    def stop(self) -> None:
        """End `run` after the action that is under way."""
        self._stopping = True
        self._ledger.targets.ring()

    def resync(self) -> None:
        """Forget what was believed of the engine: it is loaded again, at once, whatever state it is in."""
        self._agenda = Agenda()
        record = replace(self._record, serving=None, failures=0, taints=0, strikes={})
        if record.state is EngineState.QUARANTINED:
            record = replace(record, state=EngineState.TAINTED)
        elif record.known and record.state is not EngineState.UNREACHABLE:
            record = replace(record, state=EngineState.BEHIND)
        self._ledger.put_engine(record, "resync was asked for: it will be loaded again")
        self._ledger.targets.ring()

    async def trial(self, version: VersionRecord) -> str | None:
        """Ask the engine for a few tokens; why they are not in order, None where they are."""
        return await self._engine.trial(label_of(version))

    @property
    def _record(self) -> EngineRecord:
        """The engine as it is now. It may have been removed at any await: then whatever is under way ends here."""
        if not self._is_named:
            raise _RemovedError
        return self._ledger.engines[self.id]

    @property
    def _is_named(self) -> bool:
        record = self._ledger.engines.get(self.id)
        return record is not None and record.url == self._url

    def _unless_removed(self, after: EngineRecord) -> None:
        """The load of an engine that was removed meanwhile has ended: nobody else will say what it has left there."""
        if not self._is_named:
            self._ledger.leave(after)
            raise _RemovedError

    def _now(self) -> float:
        return self._ledger.clock.monotonic()

    def _goals(self) -> Goals:
        record = self._record
        goals = self._ledger.goals_of(record)
        candidates = (goals.target, goals.loadable, goals.last_good)
        recorded = frozenset(v.id for v in candidates if v is not None and self._fingerprint_of(v.id) is not None)
        serving = self._ledger.versions.get(record.serving or "")
        return replace(goals, serving=serving, recorded=recorded)

    def _fingerprint_of(self, version: str) -> str | None:
        return self._ledger.fingerprint(version, self._record.configuration or "")

    async def _probe(self) -> None:
        before = self._record
        seen = await self._engine.probe()
        wait = self._probe_interval
        if not isinstance(seen, Reached):
            self._agenda = replace(self._agenda, failed=None)
            wait = min(wait, backoff(1, self._chance)) if before.state is EngineState.PROBING else wait
        self._agenda = replace(self._agenda, probe_at=self._now() + wait)
        after = after_probe(self._record, seen, self._expected(), self._target_id(), self._now())
        if isinstance(seen, Reached) and before.state in _AWAY and after.serving is not None:
            after = await self._adopted(after)
        self._put(before, after)

    async def _adopted(self, engine: EngineRecord) -> EngineRecord:
        """Path and label are only names: hold the contents of an engine that was out of sight against the record."""
        recorded = self._fingerprint_of(engine.serving or "")
        found = await self._engine.fingerprint(recorded)
        if recorded is None or found == recorded:
            return engine  # a server that has a record can tell: an answer that is lost proves nothing
        reason = f"its contents are not those of {engine.serving}, whatever its label says"
        return standing(replace(engine, serving=None, reason=reason), self._target_id())

    def _expected(self) -> Expected | None:
        serving = self._ledger.versions.get(self._record.serving or "")
        record = self._record
        if serving is None:  # the version was collected meanwhile: what it left behind is what counts
            return Expected(path=record.model_path or "", label=record.weight_version or "")
        if serving.kind is Kind.DELTA:  # loaded from a copy, which may hold something else by now, or be gone
            return Expected(path=record.model_path or "", label=label_of(serving))
        return Expected(path=self._seen_path(serving) or "", label=label_of(serving))

    def _target_id(self) -> str | None:
        target = self._goals().target
        return None if target is None else target.id

    async def _resume(self) -> None:
        if await self._engine.resume():
            self._ledger.put_engine(replace(self._record, resume_owed=False))
        else:
            self._agenda = replace(self._agenda, resume_at=self._now() + backoff(1, self._chance), probe_at=0.0)

    async def _refit(self, version: VersionRecord) -> None:
        attempt = self._ledger.open_attempt(self.id, version.id)  # from here on the version is leased
        with bound_contextvars(version=version.id, attempt=attempt.id, **self._rollout_of(version)):
            await self._carry_out(attempt, version)

    def _rollout_of(self, version: VersionRecord) -> dict[str, int]:
        """The rollout that brings a version here; none brings back the last good one."""
        rollout = self._ledger.rollouts.get(version.run)
        return {} if rollout is None or rollout.version != version.id else {"rollout": rollout.number}

    async def _carry_out(self, attempt: AttemptRecord, version: VersionRecord) -> None:
        before = self._record
        self._ledger.put_engine(replace(before, state=EngineState.UPDATING), f"UPDATING: loads {version.id}")
        # Right before each load, because the files may have been rewritten or deleted since they were sealed; and the
        # disk writes the intent meanwhile.
        in_place = takes_in_place(before, version, self._ledger.versions)
        path = self._seen_path(version, in_place=in_place)
        unchanged, unwritten, _ = await asyncio.gather(
            self._check(version, in_place=in_place), self._written(), self._warm(version)
        )
        if unwritten is not None:
            self._drop(before, attempt, f"{unwritten}: without a durable intent nothing is sent")
            return
        if not unchanged or path is None:
            self._drop(before, attempt, "its files are not those that were checked, or cannot be looked at")
            return
        target = self._target_for(before, version, path, in_place=in_place)
        refit = await self._refitted(before, version, target, attempt)
        self._close(before, version, refit, attempt)

    async def _take(self, version: VersionRecord, offer: str) -> None:
        """Load from the trainer's memory, once: who does not come through waits for the files."""
        attempt = self._ledger.open_attempt(self.id, version.id)
        with bound_contextvars(version=version.id, attempt=attempt.id, **self._rollout_of(version)):
            try:
                await self._carry_over(attempt, version, offer)
            finally:
                if self._is_named:  # nobody waits for one that was removed
                    self._ledger.answered(self._record, version)

    async def _carry_over(self, attempt: AttemptRecord, version: VersionRecord, offer: str) -> None:
        before = self._record
        self._ledger.put_engine(
            replace(before, state=EngineState.UPDATING), f"UPDATING: takes {version.id} from its trainer's memory"
        )
        unwritten = await self._written()
        if unwritten is not None:
            self._drop(before, attempt, f"{unwritten}: without a durable intent nothing is sent")
            return
        offered = Offered(version=version.id, path=version.path, offer=offer)
        path = self._seen_path(version) or ""
        target = replace(self._target_for(before, version, path, in_place=False), offered=offered)
        refit = await self._refitted(before, version, target, attempt)
        if refit.outcome is Outcome.NACK:
            self._decline(before, refit, attempt)
        else:
            self._close(before, version, refit, attempt)

    def _decline(self, before: EngineRecord, refit: Refit, attempt: AttemptRecord) -> None:
        """It holds what it held, and nothing is wrong with the version: its files come."""
        closed = replace(attempt, outcome=refit.outcome.name, reason=refit.reason, timings=refit.timings)
        self._ledger.close_attempt(closed)
        self._unless_removed(before)
        owes = replace(self._record, last_attempt=closed, resume_owed=not refit.resumed, reason=refit.reason)
        self._put(before, replace(owes, state=before.state))

    async def _refitted(
        self, before: EngineRecord, version: VersionRecord, target: Target, attempt: AttemptRecord
    ) -> Refit:
        try:
            return await self._engine.refit(target, self._on_stage)
        except asyncio.CancelledError:
            refit = Refit(outcome=Outcome.TAINTED, resumed=False, reason="the service was stopped in mid-update")
            self._close(before, version, refit, attempt)
            self._forgive(before)
            raise

    async def _written(self) -> str | None:
        """Wait until the intent is durable; why it is not, None where it is."""
        try:
            await self._ledger.durable()
        except JournalError as error:
            return str(error)
        return None

    def _drop(self, before: EngineRecord, attempt: AttemptRecord, reason: str) -> None:
        """Something of the service's own is in the way: the engine never heard of it, and is as it was."""
        self._ledger.close_attempt(replace(attempt, outcome=NOT_SENT, reason=reason))
        self._unless_removed(before)
        self._agenda = replace(self._agenda, failed=attempt.version, retry_at=self._now() + backoff(1, self._chance))
        self._put(before, replace(self._record, state=before.state))

    def _target_for(self, engine: EngineRecord, version: VersionRecord, path: str, *, in_place: bool) -> Target:
        serving = self._ledger.versions.get(engine.serving or "")
        differs = serving is not None and serving.differs_in_weights(version)
        return Target(
            path=path,
            label=label_of(version),
            fingerprint=self._fingerprint_of(version.id),
            not_fingerprint=self._fingerprint_of(serving.id) if serving is not None and differs else None,
            repairs=not engine.known,
            files=_files(version) if in_place or version.kind is not Kind.DELTA else None,
            in_place=in_place,
            unchanged=partial(self._is_unchanged, version, in_place=in_place),
        )

    async def _is_unchanged(self, version: VersionRecord, *, in_place: bool) -> bool:
        """What was taken from memory is held against its fingerprints by the engine itself."""
        return version.state.is_open or await self._check(version, in_place=in_place)

    def _on_stage(self, stage: Stage) -> None:
        if stage is Stage.VERIFY and self._is_named:
            self._ledger.put_engine(replace(self._record, state=EngineState.VERIFYING), "VERIFYING: has loaded")

    def _close(self, before: EngineRecord, version: VersionRecord, refit: Refit, attempt: AttemptRecord) -> None:
        closed = replace(attempt, outcome=refit.outcome.name, reason=refit.reason, timings=refit.timings)
        self._ledger.close_attempt(closed)
        self._unless_removed(after_refit(before, version.id, refit, self._now()))
        after = after_refit(replace(self._record, last_attempt=closed), version.id, refit, self._now())
        if refit.outcome is Outcome.ACK:
            after = self._acknowledged(before, after, version, refit)
        elif not refit.needs_full:  # what it needs is another road, and no other time
            wait = backoff(max(after.failures, after.strikes.get(version.id, 0), 1), self._chance)
            self._agenda = replace(self._agenda, failed=version.id, retry_at=self._now() + wait)
        self._put(before, after)

    def _forgive(self, before: EngineRecord) -> None:
        """That the service was stopped says nothing against the version."""
        if (record := self._ledger.engines.get(self.id)) is not None:
            self._ledger.put_engine(replace(record, strikes=before.strikes, failures=before.failures))

    def _acknowledged(
        self, before: EngineRecord, after: EngineRecord, version: VersionRecord, refit: Refit
    ) -> EngineRecord:
        wait = self._probe_interval if refit.resumed else 0.0
        self._agenda = replace(self._agenda, probe_at=self._now() + wait)
        if self._agenda.failed == version.id:
            self._agenda = replace(self._agenda, failed=None)
        if refit.fingerprint is not None and after.configuration is not None:
            self._ledger.record_fingerprint(version.id, after.configuration, refit.fingerprint)
        serving = self._ledger.versions.get(before.serving or "")
        skipped = skipped_between(self._ledger.versions_of(version.run), serving, version)
        in_place = takes_in_place(before, version, self._ledger.versions)
        after = replace(
            after,
            weight_version=label_of(version),
            model_path=self._seen_path(version, in_place=in_place) or after.model_path,
            beneath=(before.beneath or before.serving) if in_place else None,
            wants_full=version.kind is Kind.DELTA and not in_place,  # its plugin knows nothing of what a copy held
            skipped=before.skipped + len(skipped),
        )
        target = version.id if version.state.is_open else self._target_id()  # what is held from memory is the target
        return standing(after, target) if refit.resumed else after

    def _put(self, before: EngineRecord, after: EngineRecord) -> None:
        _ = self._record
        if (before.plugin, before.stock_reason) != (after.plugin, after.stock_reason):
            self._ledger.say("engine", self.id, after.how_it_loads, state=after.state.value)
        changed = (before.state, before.serving, before.reason) != (after.state, after.serving, after.reason)
        self._ledger.put_engine(after, _sentence(after) if changed else None)


def label_of(version: VersionRecord) -> str:
    """The weight_version that an engine gets: the step, as trainers expect it."""
    return str(version.order.step)


def _files(version: VersionRecord) -> Files | None:
    """What the plugin has to know of a version; None for one that it leaves to SGLang."""
    if not version.owned or version.digest is None or version.signature is None:
        return None
    return Files(
        version=version.id,
        path=version.path,
        digest=version.digest,
        signature=version.signature,
        allow_missing=version.allow_missing,
        allow_extra=version.allow_extra,
    )


def _sentence(engine: EngineRecord) -> str:
    serving = engine.serving or ("start-up weights" if engine.known else "unknown contents")
    return f"{engine.state}: serves {serving}" + (f" ({engine.reason})" if engine.reason else "")
