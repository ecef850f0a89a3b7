"""What is known of a version's bytes: by the service's own reading, or by what engines' GPUs have proved.

Whoever proves it, the service reads manifest, index, headers and the files beside the weights.
"""

import asyncio
from typing import Protocol

from refitd.catalog.files import Files
from refitd.policy.proving import Prove
from refitd.state.version import VersionRecord
from refitd_client.checkpoint.inventory import Reference
from refitd_client.validation.delta import Base
from refitd_client.validation.proof import unprovable
from refitd_client.validation.validate import Evidence, Options, Structure, judge


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
