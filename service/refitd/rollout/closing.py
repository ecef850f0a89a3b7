"""What is written down when a load has ended: of the attempt, of the engine, and when what may be tried again."""

from dataclasses import dataclass, replace

from refitd.engine.port import Outcome, Refit
from refitd.policy.in_place import takes_in_place
from refitd.policy.label import label_of
from refitd.policy.observe import after_refit, standing
from refitd.policy.target import skipped_between
from refitd.rollout.entry import Entry
from refitd.rollout.reading import SeenPath
from refitd.state.records import NOT_SENT, AttemptRecord, EngineRecord
from refitd.state.version import VersionRecord
from refitd_client.contract.states import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """Of one engine's loads."""

    entry: Entry
    seen_path: SeenPath
    probe_interval: float

    def close(self, before: EngineRecord, version: VersionRecord, refit: Refit, attempt: AttemptRecord) -> None:
        """The engine was told to load, and this came of it."""
        entry, closed = self.entry, self._closed(attempt, refit)
        entry.unless_removed(after_refit(before, version.id, refit, entry.now))
        after = after_refit(replace(entry.record, last_attempt=closed), version.id, refit, entry.now)
        if refit.outcome is Outcome.ACK:
            after = self._acknowledged(before, after, version, refit)
        elif not refit.needs_full:  # what it needs is another road, and no other time
            later = entry.later(max(after.failures, after.strikes.get(version.id, 0), 1))
            entry.agenda = replace(entry.agenda, failed=version.id, retry_at=later)
        entry.put(before, after)

    def decline(self, before: EngineRecord, refit: Refit, attempt: AttemptRecord) -> None:
        """It did not take what was offered: it holds what it held, and nothing is wrong with the version."""
        entry, closed = self.entry, self._closed(attempt, refit)
        entry.unless_removed(before)
        owes = replace(entry.record, last_attempt=closed, resume_owed=not refit.resumed, reason=refit.reason)
        entry.put(before, replace(owes, state=before.state))

    def drop(self, before: EngineRecord, attempt: AttemptRecord, reason: str) -> None:
        """Something of the service's own is in the way: the engine was not told to load, and is as it was."""
        entry = self.entry
        entry.store.close_attempt(replace(attempt, outcome=NOT_SENT, reason=reason))
        entry.unless_removed(before)
        entry.agenda = replace(entry.agenda, failed=attempt.version, retry_at=entry.later(1))
        entry.put(before, replace(entry.record, state=before.state))

    def forgive(self, before: EngineRecord) -> None:
        """That the service was stopped says nothing against the version."""
        store = self.entry.store
        if (record := store.engines.get(self.entry.id)) is not None:
            held, taints = before.serving or before.held, before.taints
            kept = replace(record, strikes=before.strikes, failures=before.failures, taints=taints, held=held)
            store.put_engine(kept)

    def _closed(self, attempt: AttemptRecord, refit: Refit) -> AttemptRecord:
        closed = replace(attempt, outcome=refit.outcome.name, reason=refit.reason, timings=refit.timings)
        self.entry.store.close_attempt(closed)
        return closed

    def _acknowledged(
        self, before: EngineRecord, after: EngineRecord, version: VersionRecord, refit: Refit
    ) -> EngineRecord:
        store = self.entry.store
        self._reschedule(version, refit)
        if refit.fingerprint is not None and after.configuration is not None:
            store.record_fingerprint(version.id, after.configuration, refit.fingerprint)
        serving = store.versions.get(before.serving or "")
        skipped = skipped_between(store.versions_of(version.run), serving, version)
        in_place = takes_in_place(before.to_load, version, store.versions)
        after = replace(
            after,
            weight_version=label_of(version),
            model_path=self.seen_path(version, in_place=in_place) or after.model_path,
            beneath=(before.beneath or before.serving) if in_place else None,
            wants_full=version.kind is Kind.DELTA and not in_place,  # its plugin knows nothing of what a copy held
            skipped=before.skipped + len(skipped),
        )
        target = version.id if version.state.is_open else self.entry.target_id  # what is held from memory is the target
        return standing(after, target) if refit.resumed else after

    def _reschedule(self, version: VersionRecord, refit: Refit) -> None:
        entry, agenda = self.entry, self.entry.agenda
        failed = None if agenda.failed == version.id else agenda.failed
        wait = self.probe_interval if refit.resumed else 0.0
        entry.agenda = replace(agenda, failed=failed, probe_at=entry.now + wait)
