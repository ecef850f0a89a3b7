"""One engine's loads, by a version's files or from its trainer's memory: from the intent to the call.

The order of writes is the point. The intent to load is durable before the engine is told to, so that a crash in the
middle is found at the next start and the engine counts as TAINTED; what it makes ready before writes nothing. The
outcome is written after the engine was resumed, so that no journal write lengthens a pause.
"""

import asyncio
from dataclasses import dataclass, replace
from functools import partial

from structlog.contextvars import bound_contextvars

from refitd.engine.port import Engine, Files, Offered, Outcome, Refit, Stage, Target
from refitd.policy.in_place import takes_in_place
from refitd.policy.label import label_of
from refitd.rollout.closing import Closing
from refitd.rollout.entry import Entry
from refitd.rollout.reading import Reading
from refitd.state.records import AttemptRecord, EngineRecord
from refitd.state.version import VersionRecord
from refitd_client.contract.states import EngineState, Kind

_NOT_DURABLE = "without a durable intent nothing is sent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """Of one engine, one at a time."""

    entry: Entry
    engine: Engine
    reading: Reading
    closing: Closing

    async def by_files(self, version: VersionRecord) -> None:
        """Load a version's files, or the copy that holds it."""
        attempt = self.entry.store.open_attempt(self.entry.id, version.id)  # from here on the version is leased
        with bound_contextvars(version=version.id, attempt=attempt.id, **self._rollout_of(version)):
            await self._load_files(attempt, version)

    async def from_memory(self, version: VersionRecord, offer: str) -> None:
        """Load from the trainer's memory, once: who does not come through waits for the files."""
        attempt = self.entry.store.open_attempt(self.entry.id, version.id)
        with bound_contextvars(version=version.id, attempt=attempt.id, **self._rollout_of(version)):
            try:
                await self._take(attempt, version, offer)
            finally:
                if self.entry.is_named:  # nobody waits for one that was removed
                    self.entry.targets.answered(self.entry.record, version)

    def _rollout_of(self, version: VersionRecord) -> dict[str, int]:
        """The rollout that brings a version here; none brings back the last good one."""
        rollout = self.entry.store.rollouts.get(version.run)
        return {} if rollout is None or rollout.version != version.id else {"rollout": rollout.number}

    async def _load_files(self, attempt: AttemptRecord, version: VersionRecord) -> None:
        before = self._updating(f"loads {version.id}")
        # Right before each load, because the files may have been rewritten or deleted since they were sealed; and the
        # disk writes the intent meanwhile.
        in_place = takes_in_place(before.to_load, version, self.entry.store.versions)
        path = self.reading.seen_path(version, in_place=in_place)
        unchanged, unwritten, _ = await asyncio.gather(
            self.reading.check(version, in_place=in_place), self.entry.written(), self.reading.warm(version)
        )
        if unwritten is not None:
            self.closing.drop(before, attempt, f"{unwritten}: {_NOT_DURABLE}")
            return
        if not unchanged or path is None:
            reason = "its files are not those that were checked, or cannot be looked at"
            self.closing.drop(before, attempt, reason)
            return
        target = self._target_for(before, version, path, in_place=in_place)
        refit = await self._refitted(before, version, target, attempt)
        self.closing.close(before, version, refit, attempt)

    async def _take(self, attempt: AttemptRecord, version: VersionRecord, offer: str) -> None:
        before = self._updating(f"takes {version.id} from its trainer's memory")
        offered = Offered(version=version.id, path=version.path, offer=offer)
        try:
            unwritten, _ = await asyncio.gather(self.entry.written(), self.engine.prefetch(offered))
        except asyncio.CancelledError:
            self.closing.drop(before, attempt, "the service was stopped before the load")
            raise
        if unwritten is not None:
            self.closing.drop(before, attempt, f"{unwritten}: {_NOT_DURABLE}")
            return
        path = self.reading.seen_path(version) or ""
        target = replace(self._target_for(before, version, path, in_place=False), offered=offered)
        refit = await self._refitted(before, version, target, attempt)
        if refit.outcome is Outcome.NACK:
            self.closing.decline(before, refit, attempt)
        else:
            self.closing.close(before, version, refit, attempt)

    def _updating(self, text: str) -> EngineRecord:
        """What it was before."""
        before = self.entry.record
        self.entry.store.put_engine(replace(before, state=EngineState.UPDATING), f"UPDATING: {text}")
        return before

    async def _refitted(
        self, before: EngineRecord, version: VersionRecord, target: Target, attempt: AttemptRecord
    ) -> Refit:
        try:
            return await self.engine.refit(target, self._on_stage)
        except asyncio.CancelledError:
            refit = Refit(outcome=Outcome.TAINTED, resumed=False, reason="the service was stopped in mid-update")
            self.closing.close(before, version, refit, attempt)
            self.closing.forgive(before)
            raise

    def _on_stage(self, stage: Stage) -> None:
        if stage is Stage.VERIFY and self.entry.is_named:
            verifying = replace(self.entry.record, state=EngineState.VERIFYING)
            self.entry.store.put_engine(verifying, "VERIFYING: has loaded")

    def _target_for(self, engine: EngineRecord, version: VersionRecord, path: str, *, in_place: bool) -> Target:
        serving = self.entry.store.versions.get(engine.serving or engine.held or "")
        differs = serving is not None and serving.differs_in_weights(version)
        return Target(
            path=path,
            label=label_of(version),
            fingerprint=self.entry.fingerprint_of(version.id),
            not_fingerprint=self.entry.fingerprint_of(serving.id) if serving is not None and differs else None,
            repairs=not engine.known,
            files=_files(version) if in_place or version.kind is not Kind.DELTA else None,
            in_place=in_place,
            unchanged=partial(self._is_unchanged, version, in_place=in_place),
        )

    async def _is_unchanged(self, version: VersionRecord, *, in_place: bool) -> bool:
        """What was taken from memory is held against its fingerprints by the engine itself."""
        return version.state.is_open or await self.reading.check(version, in_place=in_place)


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
