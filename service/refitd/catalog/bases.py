"""What a delta is held against: the tensors and fingerprints of its base. The shell around `chain`."""

from collections.abc import Iterable

from refitd.catalog.files import Files
from refitd.policy.chain import NoBase, base_of, chain_of
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd_client.checkpoint.recent import Recent
from refitd_client.validation.delta import Base
from refitd_client.validation.evidence import Structure

_REMEMBERED = 4  # a full version that many deltas stand on, and the last of them, of two runs


class Bases:
    """Looks at manifests and headers of versions that were found good; no weights are read.

    What was parsed is remembered, and looked at from outside from then on.
    """

    def __init__(self, store: Store, files: Files) -> None:
        self._store = store
        self._files = files
        self._remembered: Recent[tuple[str, str | None], Structure] = Recent(_REMEMBERED)

    def record_of(self, delta: VersionRecord) -> VersionRecord | NoBase:
        """The base's record as of now."""
        return base_of(delta, self._store.versions, gone=delta.base in self._store.gone)

    async def of(self, delta: VersionRecord) -> Base | NoBase:
        """What the delta leads from.

        Raises:
            OSError: it cannot be read just now.
        """
        base = self.record_of(delta)
        if isinstance(base, NoBase):
            return base
        chain = chain_of(base, self._store.versions)
        if isinstance(chain, NoBase):
            return NoBase(f"of {base.id}, {chain.reason}", chain.final)
        full = chain[0]
        seen = await self._look({full.path: full, base.path: base}.values())
        changed = [record.id for record in (full, base) if seen[record.path].signature != record.signature]
        if changed:
            return NoBase(f"the files of {changed[0]} are not those that were checked: publish in full", final=True)
        manifest = seen[base.path].manifest
        return Base(base.id, seen[full.path].inventory, {} if manifest is None else manifest.fingerprints)

    async def _look(self, records: Iterable[VersionRecord]) -> dict[str, Structure]:
        """By path. Raises OSError."""
        known = {record.path: self._remembered.get((record.path, record.signature)) for record in records}
        now = await self._files.signatures([path for path, seen in known.items() if seen is not None])
        return {
            path: seen if seen is not None and now.get(path) == seen.signature else await self._parsed(path)
            for path, seen in known.items()
        }

    async def _parsed(self, path: str) -> Structure:
        seen = await self._files.structure(path)
        if not seen.faults:
            self._remembered.put((path, seen.signature), seen)
        return seen
