"""Writes verdicts into the store: a version's state, what was learned of it; and wakes the deltas that wait for it."""

from dataclasses import replace

from refitd.catalog.waiting import Waiting
from refitd.policy.admit import LIMITS, completed
from refitd.state.store import Store
from refitd_client.checkpoint.fault import Code
from refitd_client.contract.states import VersionState
from refitd_client.validation.validate import Evidence, Valid

_AGAIN = "announce the version again (the same notice: POST /v1/versions) to have it validated once more"


class Verdicts:
    """Writes them into the store."""

    def __init__(self, store: Store, waiting: Waiting) -> None:
        self._store = store
        self._waiting = waiting

    def move(self, id_: str, state: VersionState, reason: str | None) -> None:
        """Set a state that is no verdict.

        Args:
            id_: the version.
            state: SETTLING, UNKNOWN or ANNOUNCED.
            reason: why, None where there is nothing to say.
        """
        record = self._store.versions[id_]
        if (record.state, record.reason) != (state, reason):
            self._store.put_version(replace(record, state=state, reason=reason))

    def begin(self, id_: str) -> None:
        """Set VALIDATING, before the files are read. A start after a crash finds which version was being read."""
        record = self._store.versions[id_]
        begun = replace(record, state=VersionState.VALIDATING, reason=None, unended=record.unended + 1)
        self._store.put_version(begun)

    def end(self, id_: str) -> None:
        """Note that reading has ended and the service is alive."""
        record = self._store.versions.get(id_)
        if record is not None and record.unended:
            self._store.put_version(replace(record, unended=0))

    def again(self, id_: str) -> None:
        """Judge the version again at once: what was found out does not count any more."""
        self._waiting.at_once(id_)
        self.move(id_, VersionState.ANNOUNCED, None)

    def unknown(self, id_: str, reason: str) -> None:
        """Set UNKNOWN: the version could not be read, and is neither good nor bad. It is tried again."""
        self._waiting.later(id_)
        self.move(id_, VersionState.UNKNOWN, reason)

    def reject(self, id_: str, reason: str, code: Code | None = None) -> None:
        """Set REJECTED.

        Args:
            id_: the version.
            reason: what is wrong with it, a sentence.
            code: the kind of fault, None where it was never validated.
        """
        record = self._store.versions[id_]
        self._waiting.forget(id_)
        rejected = replace(record, state=VersionState.REJECTED, reason=reason, code=code, unended=0)
        self._store.put_version(rejected, f"rejected: {reason}")
        self._wake_deltas(id_)

    def set_aside(self, id_: str) -> None:
        """Reject a version whose validation the service did not survive; announcing it again has it validated."""
        reason = (
            f"set aside: the service died {self._store.versions[id_].unended} times while it validated this version. "
            f"See in the log of the service, or of its container, why it died (often for want of memory), then {_AGAIN}"
        )
        self.reject(id_, reason, Code.SET_ASIDE)

    def out_of_memory(self, id_: str) -> None:
        """Reject a version that takes more memory than the operating system gives the service."""
        reason = f"the service does not have the memory that validating it takes: give it more, then {_AGAIN}"
        self.reject(id_, reason, Code.OUT_OF_MEMORY)

    def seal(self, id_: str, verdict: Valid, evidence: Evidence, took: dict[str, float]) -> None:
        """Set SEALED.

        Args:
            id_: the version.
            verdict: what was found in its files.
            evidence: the files as they were read.
            took: milliseconds by stage.
        """
        self._waiting.forget_tries(id_)
        record, seen, notes = self._store.versions[id_], evidence.structure, list(verdict.notes)
        metadata = record.metadata
        if seen is not None and seen.manifest is not None:
            both = completed(record.metadata, seen.manifest.metadata)
            metadata = record.metadata if both is None else both
            if both is None:
                notes.append(f"the metadata in refit.json is left out: a version's has at most {LIMITS}")
        sealed = replace(
            record,
            state=VersionState.SEALED,
            reason=None,
            bytes=verdict.bytes,
            digest=verdict.digest,
            weights=verdict.weights,
            shards=verdict.shards,
            inventory=verdict.inventory,
            fingerprints=verdict.fingerprints,
            signature=None if seen is None else seen.signature,
            owned=seen is not None and seen.has_manifest,
            metadata=metadata,
            timings=record.timings | took,
        )
        self._store.put_version(sealed, "; ".join([f"sealed: {verdict.bytes} bytes in good order", *notes]))
        self._wake_deltas(id_)

    def _wake_deltas(self, base: str) -> None:
        """Judge the deltas that waited for the verdict on their base."""
        for version in self._store.open.values():
            if version.base == base and version.state is VersionState.UNKNOWN:
                self._waiting.at_once(version.id)
        self._waiting.changed.notify()
