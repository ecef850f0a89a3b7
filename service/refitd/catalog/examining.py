"""What is known of a version's bytes: by the service's own reading, or by what engines' GPUs have proved.

Whoever proves it, the service reads manifest, index, headers and the files beside the weights.
`LateReading` reads versions that GPUs of engines have proved, for engines that have no such GPU.
`References` has what versions are held against: a checkpoint against the engines' model, a delta against its base.
"""

import asyncio
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from refitd.catalog.files import DiskFiles
from refitd.policy.chain import NoBase, base_of, chain_of
from refitd.root.handle import LISTING_SECONDS, RootHangsError, RootThreads
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.update.proving import RankProofs
from refitd_client.checkpoint.header import BoundedCache
from refitd_client.checkpoint.inventory import Reference
from refitd_client.contract.states import VersionState
from refitd_client.validation.base import Base
from refitd_client.validation.reference import ReferenceRefusedError, read_reference
from refitd_client.validation.validate import Evidence, Invalid, Options, Structure, Valid, judge, unprovable, validate

_REMEMBERED_VERSIONS = 6  # of two runs: a full version that many deltas stand on, and the last two of them


@dataclass(frozen=True, slots=True)
class Beneath:
    """The versions that a delta is held against: the full one that it stands on, and its base."""

    full: VersionRecord
    base: VersionRecord


class Bases:
    """Reads manifests and headers of sealed versions, no weights. The shell around `refitd.policy.chain`.

    What was parsed is remembered as long as the files' signature is the same.
    """

    def __init__(self, store: Store, files: DiskFiles) -> None:
        self._store = store
        self._files = files
        self._remembered: BoundedCache[tuple[str, str | None], Structure] = BoundedCache(_REMEMBERED_VERSIONS)

    def record_of(self, delta: VersionRecord) -> VersionRecord | NoBase:
        return base_of(delta, self._store.versions, gone=delta.base in self._store.gone)

    def beneath(self, delta: VersionRecord) -> Beneath | NoBase:
        """Return which versions a delta is held against, as of now. Nothing is read."""
        base = self.record_of(delta)
        if isinstance(base, NoBase):
            return base
        chain = chain_of(base, self._store.versions)
        if isinstance(chain, NoBase):
            return NoBase(f"of {base.id}, {chain.reason}", chain.final)
        return Beneath(chain[0], base)

    async def read(self, beneath: Beneath) -> Base | NoBase:
        """Return the tensors and fingerprints of the version that a delta leads from.

        Raises:
            OSError: it cannot be read now.
        """
        full, base = beneath.full, beneath.base
        seen = await self._look({full.path: full, base.path: base}.values())
        changed = [record.id for record in (full, base) if seen[record.path].signature != record.files.signature]
        if changed:
            return NoBase(
                f"the files of {changed[0]} have changed since they were checked, and are read again", final=False
            )
        manifest = seen[base.path].manifest
        return Base(base.id, seen[full.path].inventory, {} if manifest is None else manifest.fingerprints)

    def remember(self, delta: Structure) -> None:
        """Keep what was parsed of a delta that is sealed: the next one mostly leads from it."""
        self._remembered.put((delta.path, delta.signature), delta)

    async def _look(self, records: Iterable[VersionRecord]) -> dict[str, Structure]:
        """Return each record's manifest and headers by its path. Raises OSError."""
        known = {record.path: self._remembered.get((record.path, record.files.signature)) for record in records}
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


_SETTING = "set --base-model (REFITD_BASE_MODEL) to a folder with the model that the engines serve"


@dataclass(frozen=True, slots=True)
class NoReference:
    """There is nothing to hold a checkpoint against. `final` is False while that may change by itself."""

    reason: str
    final: bool


class References:
    """Finds the model of a run: the operator's base model, else one that an engine was started with.

    Reads headers only, in a thread, and remembers them.
    """

    def __init__(self, store: Store, base_model: Path | None, threads: RootThreads | None = None) -> None:
        self._store = store
        self._base_model = base_model
        self._threads = threads or RootThreads()
        self._read: dict[Path, Reference] = {}

    async def of(self, run: str) -> Reference | NoReference:
        if self._base_model is not None:
            return await self._reference(self._base_model)
        engines = [engine for engine in self._store.engines.values() if engine.run in {run, None}]
        paths = sorted({engine.seen.startup_path for engine in engines if engine.seen.startup_path is not None})
        unreadable: NoReference | None = None
        for path in paths:
            found = await self._reference(Path(path))
            if isinstance(found, Reference):
                return found
            unreadable = unreadable if found.final else found
        if unreadable is not None:
            return unreadable
        if not engines and self._store.engines:
            return NoReference(
                f"no engine follows run {run}, so there is no model to hold it against: 'refitd explain {run}' says "
                f"how to bring one here, or {_SETTING}",
                final=False,
            )
        if any(engine.state.is_away for engine in engines) or not engines:
            return NoReference(
                f"no engine has said yet which model it serves: wait for one, or {_SETTING}", final=False
            )
        where = f"the engines' start-up model ({', '.join(paths)}) cannot be read here" if paths else "no engine tells"
        return NoReference(f"no model to hold it against: {where}; {_SETTING}", final=True)

    async def _reference(self, path: Path) -> Reference | NoReference:
        if path not in self._read:
            try:
                what = f"reading the headers of {path}"
                found = await self._threads.run(what, partial(read_reference, path), within=LISTING_SECONDS)
                self._read[path] = found
                for warning in found.warnings:
                    self._store.say("root", str(path), f"of the base model {path}: {warning}", is_fault=True)
            except RootHangsError as error:
                return NoReference(f"the base model {path} cannot be read now: {error}", final=False)
            except FileNotFoundError as error:
                return NoReference(f"the base model {path} is not whole: {error}; {_SETTING}", final=True)
            except OSError as error:  # permissions and I/O errors say nothing about the version
                return NoReference(f"the base model {path} cannot be read now: {_unread(error)}", final=False)
            except ReferenceRefusedError as error:
                return NoReference(f"the base model {path} cannot be read: {error}; {_SETTING}", final=True)
        return self._read[path]


def _unread(error: OSError) -> str:
    if not isinstance(error, PermissionError):
        return f"{error}; it is tried again"
    user = f"the service runs as user id {os.geteuid()}"
    return f"{error}; {user}: let it read the folder and its files, or {_SETTING}. It is tried again"


class Examiner:
    """Gathers the evidence of versions. Without `proofs` of engines the service reads everything itself."""

    def __init__(self, files: DiskFiles, proofs: RankProofs | None) -> None:
        self._files = files
        self._proofs = proofs

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
            fingerprinted: whether the evidence gets the tensors' fingerprints: of a version without a manifest.
        """
        # What ranks cannot prove is read once: for them only the files beside the weights would be read first.
        by_service = isinstance(model, Base) or unprovable(seen) is not None or judge(seen, model, options) is not None
        if self._proofs is None or by_service:
            return await self._files.examine(seen, model, options, fingerprinted=fingerprinted), ()
        evidence, by = await asyncio.gather(
            self._files.examine(seen, model, options, beside=True), self._proofs.of(record, seen)
        )
        return (evidence, by) if by else (await self._files.examine(seen, model, options), ())


_WHY = "for an engine whose GPUs cannot prove it"


class LateReading:
    """Reads versions that GPUs have proved. Engines that go to one at the same time share one reading."""

    def __init__(
        self, store: Store, files: DiskFiles, references: References, options: Callable[[VersionRecord], Options]
    ) -> None:
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
