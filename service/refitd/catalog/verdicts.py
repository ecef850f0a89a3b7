"""Verdicts, as they are written down: the state of a version, what was learned of it, and who waited for that."""

from dataclasses import replace

from refitd.catalog.waiting import Waiting
from refitd.policy.metadata import LIMITS, completed
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd_client.checkpoint.fault import Code
from refitd_client.contract.states import VersionState
from refitd_client.validation.evidence import Evidence, Structure
from refitd_client.validation.validate import Valid

_AGAIN = "announce the version again (the same notice: POST /v1/versions) to have it validated once more"


class Verdicts:
    """Writes them into the store."""

    def __init__(self, store: Store, waiting: Waiting) -> None:
        self._store = store
        self._waiting = waiting

    def move(self, id_: str, state: VersionState, reason: str | None) -> None:
        """No verdict yet."""
        record = self._store.versions[id_]
        if (record.state, record.reason) != (state, reason):
            self._store.put_version(replace(record, state=state, reason=reason))

    def begin(self, id_: str) -> None:
        """Its files are about to be read. If the service dies meanwhile, the next start knows over which version."""
        record = self._store.versions[id_]
        begun = replace(record, state=VersionState.VALIDATING, reason=None, unended=record.unended + 1)
        self._store.put_version(begun)

    def end(self, id_: str) -> None:
        """They were read, or are not read any more, and the service is alive."""
        record = self._store.versions.get(id_)
        if record is not None and record.unended:
            self._store.put_version(replace(record, unended=0))

    def again(self, id_: str) -> None:
        """What was found out does not count any more: the next look comes at once."""
        self._waiting.at_once(id_)
        self.move(id_, VersionState.ANNOUNCED, None)

    def unknown(self, id_: str, reason: str) -> None:
        """It could not be read: neither good nor bad."""
        self._waiting.later(id_)
        self.move(id_, VersionState.UNKNOWN, reason)

    def reject(self, id_: str, reason: str, code: Code | None = None) -> None:
        """It is bad."""
        record = self._store.versions[id_]
        self._waiting.forget(id_)
        rejected = replace(record, state=VersionState.REJECTED, reason=reason, code=code, unended=0)
        self._store.put_version(rejected, f"rejected: {reason}")
        self._wake_deltas(id_)

    def set_aside(self, record: VersionRecord) -> None:
        """It is not validated any more, unless it is announced again."""
        reason = (
            f"set aside: the service died {record.unended} times while it validated this version. See in the log of "
            f"the service, or of its container, why it died (often for want of memory), then {_AGAIN}"
        )
        self.reject(record.id, reason, Code.SET_ASIDE)

    def out_of_memory(self, id_: str) -> None:
        """The operating system gives the service no more memory for it."""
        reason = f"the service does not have the memory that validating it takes: give it more, then {_AGAIN}"
        self.reject(id_, reason, Code.OUT_OF_MEMORY)

    def seal(self, id_: str, verdict: Valid, evidence: Evidence, took: dict[str, float]) -> None:
        """It is good. `took` maps stages to milliseconds."""
        self._waiting.forget_tries(id_)
        record, seen = self._store.versions[id_], evidence.structure
        metadata, notes = _metadata(record, seen), list(verdict.notes)
        if metadata is None:
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
            metadata=record.metadata if metadata is None else metadata,
            timings=record.timings | took,
        )
        self._store.put_version(sealed, "; ".join([f"sealed: {verdict.bytes} bytes in good order", *notes]))
        self._wake_deltas(id_)

    def _wake_deltas(self, base: str) -> None:
        """Those that wait for a verdict on their base have it."""
        for version in self._store.open.values():
            if version.base == base and version.state is VersionState.UNKNOWN:
                self._waiting.at_once(version.id)
        self._waiting.changed.notify()


def _metadata(record: VersionRecord, seen: Structure | None) -> dict[str, str] | None:
    """What notice and manifest say together; None where that is too much."""
    if seen is None or seen.manifest is None:
        return record.metadata
    return completed(record.metadata, seen.manifest.metadata)
