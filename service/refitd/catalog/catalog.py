"""The catalog: which versions exist, and which are good. The shell around `scan`, `settle` and `validate`.

Two loops. One lists the root, at each hint and from time to time: new directories become versions, sealed ones that
have changed or gone become LOST. The other brings each version to its verdict, the newest first, a few at a time.
"""

import asyncio
import math
from dataclasses import dataclass, replace

from structlog.contextvars import bound_contextvars

from refitd.bell import Bell
from refitd.catalog.bases import Bases
from refitd.catalog.chain import NoBase
from refitd.catalog.conventions import is_foreign, recognise
from refitd.catalog.delta import Base
from refitd.catalog.evidence import Evidence, Structure
from refitd.catalog.fault import Code
from refitd.catalog.files import Files, Unreadable
from refitd.catalog.inventory import Reference
from refitd.catalog.metadata import LIMITS, completed
from refitd.catalog.record import VersionRecord
from refitd.catalog.references import NoReference, References
from refitd.catalog.scan import Found, ListingFailed
from refitd.catalog.settle import Complete, Hopeless, Look, Settling, Wait, settle
from refitd.catalog.validate import Invalid, Options, Unknown, Valid, Verdict, validate
from refitd.ledger import Ledger
from refitd.settings import Settings
from refitd_client.contract.naming import Order, parse_version_id, version_folder, version_id
from refitd_client.contract.states import Kind, VersionState

JUDGES = 2  # versions validated at the same time: each reads its files with several threads
PACE_SECONDS = 0.02  # between two scans: a burst of hints is one hint
RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 10.0

_WATCHED = frozenset({VersionState.SEALED, VersionState.LOST})


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogRules:
    """How patient and how strict the catalog is; times in seconds. `kind` is what engines get, full versions or
    adapters; without `deltas` those are refused by kind.
    """

    scan_interval: float
    settle_for: float
    settle_timeout: float
    allow_dtype_cast: bool
    kind: Kind = Kind.FULL
    deltas: bool = True

    @classmethod
    def of(cls, settings: Settings) -> "CatalogRules":
        """From the service's settings."""
        return cls(
            scan_interval=settings.scan_interval,
            settle_for=settings.settle,
            settle_timeout=settings.settle_timeout,
            allow_dtype_cast=settings.allow_dtype_cast,
            kind=settings.kind,
            deltas=settings.takes_deltas,
        )


_Found = tuple[Options, Evidence, Verdict]  # what it may do, what was seen, what was made of it


class Catalog:
    """Brings versions from their first sight to a verdict."""

    def __init__(self, ledger: Ledger, files: Files, references: References, rules: CatalogRules) -> None:
        self._ledger = ledger
        self._files = files
        self._references = references
        self._bases = Bases(ledger, files)
        self._rules = rules
        self._hints = Bell()
        self._work = Bell()
        self._settling: dict[str, Settling] = {}
        self._due: dict[str, float] = {}
        self._tries: dict[str, int] = {}
        self._busy: set[str] = set()
        self._told: set[str] = set()
        self._rejected_as: dict[str, str] = {}  # what rejected folders looked like when they were first seen again
        self._looks: dict[str, asyncio.Task[dict[str, str | Unreadable | None]]] = {}

    def nudge(self) -> None:
        """Look again, soon."""
        self._hints.ring()
        self._work.ring()

    async def run(self) -> None:
        """Scan and judge until cancelled."""
        self._reconsider()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._scan_forever(), name="scan")
            group.create_task(self._judge_forever(group), name="judge")

    def _reconsider(self) -> None:
        """What was REJECTED for want of a model to hold it against: this start may have been given one."""
        for version in list(self._ledger.versions.values()):
            if version.state is VersionState.REJECTED and version.code is Code.NO_REFERENCE:
                again = replace(version, state=VersionState.ANNOUNCED, reason=None, code=None)
                self._ledger.put_version(again, "looked at again: there may be a model to hold it against now")

    async def check(self, record: VersionRecord) -> bool:
        """Whether a version's files are still those that were sealed; marks it LOST where they are not.

        Engines that ask at the same time share one look: a fleet's updates then also share one write of the journal.
        """
        look = self._looks.get(record.path)
        if look is None:
            look = self._looks[record.path] = asyncio.create_task(self._files.signatures([record.path]))
            look.add_done_callback(lambda _: self._looks.pop(record.path))
        found = (await asyncio.shield(look))[record.path]  # one engine that is let go stops nobody else's
        if found != record.signature and not isinstance(found, Unreadable):
            self._lose(record, gone=found is None)
        return found == record.signature

    async def _scan_forever(self) -> None:
        looked = -math.inf
        while True:
            seen = self._hints.count
            is_listed = await self._scan()
            now = self._ledger.clock.monotonic()
            if is_listed and now - looked >= self._rules.scan_interval:  # a hint says that something came, not went
                await self._look_again()
                looked = now
            await asyncio.sleep(PACE_SECONDS)
            await self._hints.after(seen, within=self._rules.scan_interval)

    async def _scan(self) -> bool:
        listing = await self._files.scan()
        if isinstance(listing, ListingFailed):
            self._ledger.root_fault = listing.reason
            return False
        self._ledger.root_fault = None
        for found in listing.found:
            self._meet(found)
        self._wake_handed()
        return True

    def _wake_handed(self) -> None:
        """Something came: the files of what was handed over, or a newer version in their place."""
        for version in self._ledger.versions.values():
            if version.handed and version.state.is_open and version.id not in self._busy:
                self._due.pop(version.id, None)
        self._work.ring()

    async def _look_again(self) -> None:
        """Whether what is sealed is still as it was, and what is not judged yet is still there."""
        versions = [v for v in self._ledger.versions.values() if v.state in _WATCHED or v.state.is_open or _may_heal(v)]
        signatures = await self._files.signatures([version.path for version in versions])
        for version in versions:
            found = signatures[version.path]
            if self._ledger.versions.get(version.id) is not version or version.id in self._busy:
                continue  # something happened to it meanwhile: the next scan looks at it
            if version.state is VersionState.LOST:
                self._find_again(version, found)
                if isinstance(found, str) and is_foreign(version.path) and not version.noticed:
                    self._rewritten(version, found)
            elif version.state is VersionState.REJECTED:
                self._judge_again(version, found)
            elif version.state is not VersionState.SEALED:
                if found is None and not version.handed:
                    self._reject(version.id, f"{version.path} was taken away before it could be checked")
            elif found != version.signature and not isinstance(found, Unreadable):
                self._lose(version, gone=found is None)

    def _meet(self, found: Found) -> None:
        order = self._placed(found) if is_foreign(found.path) else found.order
        if order is None:
            return
        id_ = version_id(found.run, order)
        if id_ in self._ledger.versions:
            return
        if id_ in self._ledger.gone:
            self._tell_once(
                id_, f"{found.path} is back after it was deleted: a restarted trainer begins a new generation"
            )
            return
        record = VersionRecord(
            run=found.run,
            order=order,
            path=found.path,
            state=VersionState.ANNOUNCED,
            created_at=self._ledger.clock.now(),
            kind=self._rules.kind,
        )
        self._ledger.put_version(record, "found in the root")
        self._work.ring()

    def _placed(self, found: Found) -> Order | None:
        """Where a trainer's own folder belongs in its run; None where the version in it is known already."""
        known = [version for version in self._ledger.versions.values() if version.path == found.path]
        if known:
            return None  # whether it was written again is seen where its files are looked at
        order = Order(self._newest(found.run).generation, found.order.step)
        is_back = version_id(found.run, order) in self._ledger.gone
        return self._written_again(found.run, order.step) if is_back else order

    def _newest(self, run: str) -> Order:
        """The newest that was ever there in a run, also when all of it was deleted."""
        if known := self._ledger.versions_of(run):
            return known[0].order
        gone = [named[1] for id_ in self._ledger.gone if (named := parse_version_id(id_)) and named[0] == run]
        return max(gone, default=Order(1, -1))

    def _written_again(self, run: str, step: int) -> Order:
        """The order of a step whose folder has new contents: a trainer that goes back begins a new generation."""
        newest = self._newest(run)
        return Order(newest.generation + 1 if step <= newest.step else newest.generation, step)

    def _rewritten(self, version: VersionRecord, found: str) -> None:
        """A trainer that was restarted has written into the folder of an earlier version of its own."""
        newer = [v for v in self._ledger.versions.values() if v.path == version.path and v.order > version.order]
        if newer or found == version.signature:
            return
        order = self._written_again(version.run, version.order.step)
        record = VersionRecord(
            run=version.run,
            order=order,
            path=version.path,
            state=VersionState.ANNOUNCED,
            created_at=self._ledger.clock.now(),
            kind=self._rules.kind,
        )
        self._ledger.put_version(record, f"{version.path} was written again: generation {order.generation}")
        self._work.ring()

    def _tell_once(self, id_: str, text: str) -> None:
        if id_ not in self._told:
            self._told.add(id_)
            self._ledger.say("version", id_, text)

    def _lose(self, record: VersionRecord, *, gone: bool) -> None:
        reason = f"{record.path} {'is gone' if gone else 'has changed'} since it was checked: publish the step again"
        current = self._ledger.versions.get(record.id)
        if current is not None and current.state is VersionState.SEALED:
            self._ledger.put_version(replace(current, state=VersionState.LOST, reason=reason), f"lost: {reason}")

    def _find_again(self, record: VersionRecord, found: str | Unreadable | None) -> None:
        """The very files that were checked are back in their place: a folder was moved away and back again."""
        if found == record.signature:
            sealed = replace(record, state=VersionState.SEALED, reason=None)
            self._ledger.put_version(sealed, f"sealed: {record.path} is back, unchanged")

    def _judge_again(self, record: VersionRecord, found: str | Unreadable | None) -> None:
        """A trainer's own folder was rejected, and is not what it was: it was not finished, or was written again."""
        seen = self._rejected_as.setdefault(record.id, found) if isinstance(found, str) else found
        if isinstance(found, str) and seen != found:
            again = replace(record, state=VersionState.ANNOUNCED, reason=None, code=None)
            self._rejected_as.pop(record.id)
            self._ledger.put_version(again, f"looked at again: {record.path} has changed since it was rejected")
            self._work.ring()

    async def _judge_forever(self, group: asyncio.TaskGroup) -> None:
        while True:
            seen = self._work.count
            now = self._ledger.clock.monotonic()
            for record in self._waiting(now)[: JUDGES - len(self._busy)]:
                self._busy.add(record.id)
                group.create_task(self._judge_one(record.id), name=f"judge {record.id}")
            soonest = min((due for id_, due in self._due.items() if id_ not in self._busy), default=now + 3600)
            await self._work.after(seen, within=max(soonest - now, 0.001) if len(self._busy) < JUDGES else None)

    def _waiting(self, now: float) -> list[VersionRecord]:
        """Versions without a verdict whose time has come, the newest first: older ones may never be needed."""
        due = [
            version
            for version in self._ledger.versions.values()
            if version.state.is_open and version.id not in self._busy and self._due.get(version.id, 0.0) <= now
        ]
        return sorted(due, key=lambda version: version.order, reverse=True)

    async def _judge_one(self, id_: str) -> None:
        self._due.pop(id_, None)
        try:
            with bound_contextvars(version=id_):
                await self._judge(self._ledger.versions[id_])
        except OSError as error:
            self._unknown(id_, f"cannot be read: {error}")
        finally:
            self._busy.discard(id_)
            self._work.ring()

    async def _judge(self, record: VersionRecord) -> None:
        try:
            structure = await self._files.structure(record.path)
        except FileNotFoundError:
            if not record.handed:
                raise
            self._await_files(record)
            return
        now = self._ledger.clock.monotonic()
        record = self._read(record.id, structure)
        decision = settle(
            _look(structure, noticed=record.noticed),
            self._settling.get(record.id),
            now,
            settle_for=0.0 if record.noticed else self._rules.settle_for,
            timeout=self._rules.settle_timeout,
        )
        match decision:
            case Wait(memory, until, reason):
                self._settling[record.id] = memory
                self._due[record.id] = until
                self._move(record.id, VersionState.SETTLING, reason)
            case Hopeless(reason):
                self._reject(record.id, reason)
            case Complete():
                self._settling.pop(record.id, None)
                await self._validate(record)

    def _await_files(self, record: VersionRecord) -> None:
        """What was handed over has no files yet. Trainers write them in order: what is newer says that none will come.

        A notice, or the scan that finds them, wakes this.
        """
        newer = [version.id for version in self._ledger.versions_of(record.run) if version.order > record.order]
        if newer:
            self._reject(record.id, f"its files never came: its trainer went on to {newer[0]}")
        else:
            self._due[record.id] = self._ledger.clock.monotonic() + LONGEST_RETRY_SECONDS

    def _read(self, id_: str, structure: Structure) -> VersionRecord:
        """What its manifest says that it is, where no notice did: from here on its base is kept."""
        record, manifest = self._ledger.versions[id_], structure.manifest
        if manifest is None or record.noticed or (record.kind, record.base) == (manifest.kind, manifest.base):
            return record
        read = replace(record, kind=manifest.kind, base=manifest.base)
        self._ledger.put_version(read)
        return read

    async def _against(self, record: VersionRecord) -> Reference | Base | NoReference | NoBase:
        """What it is held against: a delta against its base, everything else against the engines' model."""
        if record.kind is Kind.DELTA and self._rules.deltas:
            return await self._bases.of(record)
        return await self._references.of(record.run)

    async def _validate(self, record: VersionRecord) -> None:
        reference = await self._against(record)
        if isinstance(reference, NoBase) and reference.final:
            self._reject(record.id, reference.reason, Code.WRONG_BASE)
            return
        if isinstance(reference, NoBase | NoReference) and not reference.final:
            self._unknown(record.id, reference.reason)
            return
        started, waited = self._ledger.clock.monotonic(), self._ledger.since_seen(record.id)
        self._move(record.id, VersionState.VALIDATING, None)
        model = reference if isinstance(reference, Reference | Base) else None
        options, evidence, verdict = await self._examine(record, model)
        if options != self._options(self._ledger.versions[record.id]):
            self._due[record.id] = 0.0  # what it is held against may be something else, or it was not read
            self._move(record.id, VersionState.ANNOUNCED, None)
            return
        record = self._ledger.versions[record.id]
        match verdict:
            case Valid() if isinstance(reference, Base) and isinstance(self._bases.record_of(record), NoBase):
                self._due[record.id] = 0.0  # its base went meanwhile: the next look says so
                self._move(record.id, VersionState.ANNOUNCED, None)
            case Valid() if (late := self._too_late(record, evidence)) is not None:
                self._reject(record.id, late, Code.OLD_GENERATION)
            case Valid():
                took = {"seen": waited or 0.0, "validate": (self._ledger.clock.monotonic() - started) * 1000}
                self._seal(record.id, verdict, evidence, took)
            case Invalid(Code.NO_REFERENCE as code, reason):
                self._reject(record.id, reference.reason if isinstance(reference, NoReference) else reason, code)
            case Invalid(code, reason):
                self._reject(record.id, reason, code)
            case Unknown(reason):
                self._unknown(record.id, reason)

    async def _examine(
        self, record: VersionRecord, model: Reference | Base | None
    ) -> tuple[Options, Evidence, Verdict]:
        """Read it and judge it. A notice that came meanwhile counts: what was read is not read again for it."""
        options = self._options(record)
        evidence = await self._files.examine(record.path, model, options)
        told = self._ledger.versions[record.id]
        if told.kind is record.kind and evidence.contents is not None:
            options = self._options(told)
        # In a thread: a hundred thousand tensors take 0.1 s.
        return options, evidence, await asyncio.to_thread(validate, evidence, model, options)

    def _too_late(self, record: VersionRecord, evidence: Evidence) -> str | None:
        """A folder whose writer knows of no generations may be meant for the current one: it is not retired unasked."""
        current = max(version.order.generation for version in self._ledger.versions_of(record.run))
        if record.order.generation == current or (evidence.structure is not None and evidence.structure.has_manifest):
            return None
        name = version_folder(Order(current, record.order.step))
        return (
            f"{record.path} counts as generation {record.order.generation}, and run {record.run} is at generation "
            f"{current}: if it belongs there, call it {name}, or publish it with 'refitd publish'"
        )

    def _options(self, record: VersionRecord) -> Options:
        return Options(
            run=record.run,
            order=record.order,
            kind=record.kind if record.noticed else None,
            allow_missing=record.allow_missing,
            allow_extra=record.allow_extra,
            allow_dtype_cast=self._rules.allow_dtype_cast,
            takes=self._rules.kind,
        )

    def _move(self, id_: str, state: VersionState, reason: str | None) -> None:
        record = self._ledger.versions[id_]
        if (record.state, record.reason) != (state, reason):
            self._ledger.put_version(replace(record, state=state, reason=reason))

    def _unknown(self, id_: str, reason: str) -> None:
        """Look again later, and later still: each look may read everything."""
        tries = self._tries[id_] = self._tries.get(id_, 0) + 1
        self._due[id_] = self._ledger.clock.monotonic() + min(RETRY_SECONDS * 2 ** (tries - 1), LONGEST_RETRY_SECONDS)
        self._move(id_, VersionState.UNKNOWN, reason)

    def _reject(self, id_: str, reason: str, code: Code | None = None) -> None:
        record = self._ledger.versions[id_]
        self._settling.pop(id_, None)
        self._due.pop(id_, None)
        self._tries.pop(id_, None)
        rejected = replace(record, state=VersionState.REJECTED, reason=reason, code=code)
        self._ledger.put_version(rejected, f"rejected: {reason}")
        self._wake_deltas(id_)

    def _wake_deltas(self, base: str) -> None:
        """Those that wait for a verdict on their base have it."""
        for version in self._ledger.versions.values():
            if version.base == base and version.state is VersionState.UNKNOWN:
                self._due[version.id] = 0.0
        self._work.ring()

    def _seal(self, id_: str, verdict: Valid, evidence: Evidence, took: dict[str, float]) -> None:
        self._tries.pop(id_, None)
        record = self._ledger.versions[id_]
        seen = evidence.structure
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
        self._ledger.put_version(sealed, "; ".join([f"sealed: {verdict.bytes} bytes in good order", *notes]))
        self._wake_deltas(id_)


def _metadata(record: VersionRecord, seen: Structure | None) -> dict[str, str] | None:
    """What notice and manifest say together; None where that is too much."""
    if seen is None or seen.manifest is None:
        return record.metadata
    return completed(record.metadata, seen.manifest.metadata)


# Faults of a checkpoint that may just not have been written to its end.
_MAY_HEAL = frozenset(
    {
        Code.MISSING_FILE,
        Code.TORN_FILE,
        Code.NO_WEIGHTS,
        Code.BAD_INDEX,
        Code.INDEX_MISMATCH,
        Code.CHANGED,
        Code.UNREADABLE,
    }
)


def _look(structure: Structure, *, noticed: bool) -> Look:
    """What settling has to know. Who announces a checkpoint has written it: then only what may heal is waited for."""
    fault = structure.faults[0] if structure.faults else None
    foreign = recognise(structure.path)
    # Whoever writes a marker last has written all when it is there; on some file systems the rest comes later.
    said = noticed or (foreign is not None and foreign.marker is not None and structure.awaits is None)
    proof = fault is not None and fault.code not in _MAY_HEAL
    return Look(
        signature=structure.signature,
        final=structure.has_manifest or (said and proof) or (said and not noticed and fault is None),
        fault=None if fault is None else fault.reason,
        awaits=None if noticed else structure.awaits,
    )


def _may_heal(version: VersionRecord) -> bool:
    """A rejected folder of a trainer's own, which nobody announces again when it is mended."""
    return version.state is VersionState.REJECTED and is_foreign(version.path) and not version.noticed
