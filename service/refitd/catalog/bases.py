"""What a delta is held against: the tensors and fingerprints of its base. The shell around `chain`."""

from refitd.catalog.chain import NoBase, base_of, chain_of
from refitd.catalog.delta import Base
from refitd.catalog.files import Files
from refitd.catalog.record import VersionRecord
from refitd.ledger import Ledger


class Bases:
    """Looks at manifests and headers of versions that were found good; no weights are read."""

    def __init__(self, ledger: Ledger, files: Files) -> None:
        self._ledger = ledger
        self._files = files

    def record_of(self, delta: VersionRecord) -> VersionRecord | NoBase:
        """The base's record as of now."""
        return base_of(delta, self._ledger.versions, gone=delta.base in self._ledger.gone)

    async def of(self, delta: VersionRecord) -> Base | NoBase:
        """What the delta leads from.

        Raises:
            OSError: it cannot be read just now.
        """
        base = self.record_of(delta)
        if isinstance(base, NoBase):
            return base
        chain = chain_of(base, self._ledger.versions)
        if isinstance(chain, NoBase):
            return NoBase(f"of {base.id}, {chain.reason}", chain.final)
        full, seen = await self._files.structure(chain[0].path), await self._files.structure(base.path)
        changed = [
            record.id for record, found in ((chain[0], full), (base, seen)) if found.signature != record.signature
        ]
        if changed:
            return NoBase(f"the files of {changed[0]} are not those that were checked: publish in full", final=True)
        fingerprints = {} if seen.manifest is None else seen.manifest.fingerprints
        return Base(base.id, full.inventory, fingerprints)
