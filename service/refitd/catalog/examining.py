"""What is known of a version's bytes: by the service's own reading, or by what engines' GPUs have proved.

Whoever proves it, the service reads manifest, index, headers and the files beside the weights.
`LateReading` reads versions that GPUs of engines have proved, for engines that have no such GPU.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from refitd.catalog.files import Files
from refitd.catalog.references import References
from refitd.policy.admit import Prove
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd_client.checkpoint.inventory import Reference
from refitd_client.contract.states import VersionState
from refitd_client.validation.delta import Base
from refitd_client.validation.validate import Evidence, Invalid, Options, Structure, Valid, judge, unprovable, validate


class Found(Protocol):
    """What engines' ranks say of a version: `by` are the engines that prove it, `faults` why others do not."""

    @property
    def by(self) -> tuple[str, ...]: ...

    @property
    def faults(self) -> tuple[str, ...]: ...


class Proofs(Protocol):
    """Asks for what engines' GPUs have found in a version."""

    async def of(self, version: VersionRecord, seen: Structure) -> Found: ...


class Examiner:
    """Gathers the evidence of versions.

    Args:
        files: the files under the root.
        proofs: what engines have found; None where the service reads everything itself.
        prove: the operator's setting.
    """

    def __init__(self, files: Files, proofs: Proofs | None, prove: Prove) -> None:
        self._files = files
        self._proofs = None if prove is Prove.SERVICE else proofs
        self._prove = prove

    async def examine(
        self,
        record: VersionRecord,
        seen: Structure,
        model: Reference | Base | None,
        options: Options,
        *,
        fingerprinted: bool,
    ) -> tuple[Evidence, tuple[str, ...]]:
        """Return the evidence, and the engines whose GPUs have proved it where the service did not read the weights.

        Args:
            record: the version.
            seen: the last look at its files.
            model: what its tensors are held against.
            options: what it may do.
            fingerprinted: whether the evidence gets the tensors' fingerprints: of a version without a manifest.
        """
        # What ranks cannot prove is read once: for them only the files beside the weights would be read first.
        by_service = isinstance(model, Base) or unprovable(seen) is not None or judge(seen, model, options) is not None
        if self._proofs is None or by_service:
            return await self._files.examine(seen, model, options, fingerprinted=fingerprinted), ()
        reads_all = self._prove is Prove.BOTH
        evidence, found = await asyncio.gather(
            self._files.examine(seen, model, options, beside=not reads_all), self._proofs.of(record, seen)
        )
        if not reads_all:
            return (evidence, found.by) if found.by else (await self._files.examine(seen, model, options), ())
        if found.faults and not found.by and evidence.contents is not None:
            return Evidence(failure=f"the service has read it, and engines found otherwise: {found.faults[0]}"), ()
        return evidence, ()


_WHY = "for an engine whose GPUs cannot prove it"


class LateReading:
    """Reads versions that GPUs have proved. Engines that go to one at the same time share one reading."""

    def __init__(
        self, store: Store, files: Files, references: References, options: Callable[[VersionRecord], Options]
    ) -> None:
        """`options` says what a version may do."""
        self._store, self._files, self._references, self._options = store, files, references, options
        self._readings: dict[str, asyncio.Task[bool]] = {}

    async def read(self, record: VersionRecord) -> bool:
        """Read all of a version. Return False where it is not proved good; one that is bad is LOST from then on."""
        reading = self._readings.get(record.id)
        if reading is None:
            reading = self._readings[record.id] = asyncio.create_task(self._read(record), name=f"read {record.id}")
            reading.add_done_callback(lambda _: self._readings.pop(record.id, None))
        return await asyncio.shield(reading)  # one engine that is cancelled stops no other's reading

    async def _read(self, record: VersionRecord) -> bool:
        reference = await self._references.of(record.run)
        if not isinstance(reference, Reference):
            return False
        try:
            seen = await self._files.structure(record.path)
            if seen.signature != record.files.signature:
                return True  # not these files: what is checked before each load says so
            evidence = await self._files.examine(seen, reference, self._options(record))
        except OSError:
            return False
        verdict = await asyncio.to_thread(validate, evidence, reference, self._options(record))
        current = self._store.versions.get(record.id)
        if current is None or current.state is not VersionState.SEALED:
            return False
        if isinstance(verdict, Valid):
            self._store.put_version(current.having(proved_by=()), f"read by the service as well, {_WHY}")
        elif isinstance(verdict, Invalid):
            by = ", ".join(current.verdict.proved_by)
            reason = f"{verdict.reason} (found by the service, {_WHY}; the GPUs of {by} had read other bytes)"
            # Without a signature: its files look as they did, and must not pass for being back unchanged.
            lost = current.having(state=VersionState.LOST, reason=reason, signature=None)
            self._store.put_version(lost, f"lost: {reason}")
        return isinstance(verdict, Valid)
