"""The service's own reading of versions that GPUs of engines have proved, for engines that cannot."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from refitd.catalog.files import Files
from refitd.catalog.references import References
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd_client.checkpoint.inventory import Reference
from refitd_client.contract.states import VersionState
from refitd_client.validation.validate import Invalid, Options, Valid, validate

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
            if seen.signature != record.signature:
                return True  # not these files: what is checked before each load says so
            evidence = await self._files.examine(seen, reference, self._options(record))
        except OSError:
            return False
        verdict = await asyncio.to_thread(validate, evidence, reference, self._options(record))
        current = self._store.versions.get(record.id)
        if current is None or current.state is not VersionState.SEALED:
            return False
        if isinstance(verdict, Valid):
            self._store.put_version(replace(current, proved_by=()), f"read by the service as well, {_WHY}")
        elif isinstance(verdict, Invalid):
            by = ", ".join(current.proved_by)
            reason = f"{verdict.reason} (found by the service, {_WHY}; the GPUs of {by} had read other bytes)"
            # Without a signature: its files look as they did, and must not pass for being back unchanged.
            lost = replace(current, state=VersionState.LOST, reason=reason, signature=None)
            self._store.put_version(lost, f"lost: {reason}")
        return isinstance(verdict, Valid)
