"""From the first sight of a version to its verdict: a few at a time, the newest first. The shell around `settle` and
`validate`.
"""

import asyncio
from dataclasses import replace

from structlog.contextvars import bound_contextvars

from refitd.catalog.bases import Bases
from refitd.catalog.files import Files
from refitd.catalog.references import NoReference, References
from refitd.catalog.verdicts import Verdicts
from refitd.catalog.waiting import Waiting
from refitd.policy.chain import NoBase
from refitd.policy.rules import CatalogRules
from refitd.policy.settle import Complete, Hopeless, Wait, look_of, settle
from refitd.state.journal.journal import JournalError
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd_client.checkpoint.fault import Code
from refitd_client.checkpoint.inventory import Reference
from refitd_client.contract.naming import Order, version_folder
from refitd_client.contract.states import Kind, VersionState
from refitd_client.validation.delta import Base
from refitd_client.validation.evidence import Evidence, Structure
from refitd_client.validation.validate import Invalid, Options, Unknown, Valid, Verdict, validate


class Judge:
    """Brings each version that waits to its verdict."""

    def __init__(
        self,
        store: Store,
        files: Files,
        references: References,
        rules: CatalogRules,
        waiting: Waiting,
        verdicts: Verdicts,
    ) -> None:
        self._store = store
        self._files = files
        self._references = references
        self._bases = Bases(store, files)
        self._rules = rules
        self._waiting = waiting
        self._verdicts = verdicts

    async def run(self, group: asyncio.TaskGroup) -> None:
        """Judge until cancelled; each look is a task of `group`."""
        while True:
            seen = self._waiting.changed.count
            for record in self._waiting.take():
                group.create_task(self._judge_one(record.id), name=f"judge {record.id}")
            await self._waiting.changed.wait_after(seen, within=self._waiting.pause)

    async def _judge_one(self, id_: str) -> None:
        try:
            with bound_contextvars(version=id_):
                await self._judge(self._store.versions[id_])
        except OSError as error:
            self._verdicts.unknown(id_, f"cannot be read: {error}")
        except JournalError as error:
            self._verdicts.unknown(id_, f"it cannot be written down that it is validated: {error}")
        except MemoryError:
            self._verdicts.out_of_memory(id_)
        finally:
            self._waiting.give_back(id_)

    async def _judge(self, record: VersionRecord) -> None:
        try:
            structure = await self._files.structure(record.path)
        except FileNotFoundError:
            if not record.handed:
                raise
            self._await_files(record)
            return
        now = self._store.clock.monotonic()
        record = self._read(record.id, structure)
        decision = settle(
            look_of(structure, noticed=record.noticed),
            self._waiting.settling.get(record.id),
            now,
            settle_for=0.0 if record.noticed else self._rules.settle_for,
            timeout=self._rules.settle_timeout,
        )
        match decision:
            case Wait(memory, until, reason):
                self._waiting.settling[record.id] = memory
                self._waiting.at(record.id, until)
                self._verdicts.move(record.id, VersionState.SETTLING, reason)
            case Hopeless(reason):
                self._verdicts.reject(record.id, reason)
            case Complete():
                self._waiting.settling.pop(record.id, None)
                await self._validate(record, structure)

    def _await_files(self, record: VersionRecord) -> None:
        """What was handed over has no files yet. Trainers write in order: what is newer says that none will come."""
        newer = [version.id for version in self._store.versions_of(record.run) if version.order > record.order]
        if newer:
            self._verdicts.reject(record.id, f"its files never came: its trainer went on to {newer[0]}")
        else:
            self._waiting.for_files(record.id)

    def _read(self, id_: str, structure: Structure) -> VersionRecord:
        """What its manifest says that it is, where no notice did: from here on its base is kept."""
        record, manifest = self._store.versions[id_], structure.manifest
        if manifest is None or record.noticed or (record.kind, record.base) == (manifest.kind, manifest.base):
            return record
        read = replace(record, kind=manifest.kind, base=manifest.base)
        self._store.put_version(read)
        return read

    async def _against(self, record: VersionRecord) -> Reference | Base | NoReference | NoBase:
        """What it is held against: a delta against its base, everything else against the engines' model."""
        if record.kind is Kind.DELTA and self._rules.deltas:
            return await self._bases.of(record)
        return await self._references.of(record.run)

    async def _validate(self, record: VersionRecord, seen: Structure) -> None:
        reference = await self._against(record)
        if isinstance(reference, NoBase) and reference.final:
            self._verdicts.reject(record.id, reference.reason, Code.WRONG_BASE)
            return
        if isinstance(reference, NoBase | NoReference) and not reference.final:
            self._verdicts.unknown(record.id, reference.reason)
            return
        started, waited = self._store.clock.monotonic(), self._store.since_seen(record.id)
        model = reference if isinstance(reference, Reference | Base) else None
        self._verdicts.begin(record.id)
        try:
            await self._store.durable()
            options, evidence, verdict = await self._examine(record, seen, model)
        except (asyncio.CancelledError, OSError, MemoryError, JournalError):
            self._verdicts.end(record.id)
            raise  # what nobody expects takes the service down, and counts as its death
        self._verdicts.end(record.id)
        record = self._store.versions[record.id]
        if options != self._options(record):
            self._verdicts.again(record.id)  # what it is held against may be something else, or it was not read
            return
        took = {"seen": waited or 0.0, "validate": (self._store.clock.monotonic() - started) * 1000}
        self._conclude(record, reference, evidence, verdict, took)

    async def _examine(
        self, record: VersionRecord, seen: Structure, model: Reference | Base | None
    ) -> tuple[Options, Evidence, Verdict]:
        """Read it and judge it. A notice that came meanwhile counts: what was read is not read again for it."""
        options = self._options(record)
        evidence = await self._files.examine(seen, model, options)
        told = self._store.versions[record.id]
        if told.kind is record.kind and evidence.contents is not None:
            options = self._options(told)
        # In a thread: a hundred thousand tensors take 0.1 s.
        return options, evidence, await asyncio.to_thread(validate, evidence, model, options)

    def _conclude(
        self,
        record: VersionRecord,
        reference: Reference | Base | NoReference | NoBase,
        evidence: Evidence,
        verdict: Verdict,
        took: dict[str, float],
    ) -> None:
        match verdict:
            case Valid() if isinstance(reference, Base) and isinstance(self._bases.record_of(record), NoBase):
                self._verdicts.again(record.id)  # its base went meanwhile: the next look says so
            case Valid() if (late := self._too_late(record, evidence)) is not None:
                self._verdicts.reject(record.id, late, Code.OLD_GENERATION)
            case Valid():
                self._verdicts.seal(record.id, verdict, evidence, took)
            case Invalid(Code.NO_REFERENCE as code, reason):
                why = reference.reason if isinstance(reference, NoReference) else reason
                self._verdicts.reject(record.id, why, code)
            case Invalid(code, reason):
                self._verdicts.reject(record.id, reason, code)
            case Unknown(reason):
                self._verdicts.unknown(record.id, reason)

    def _too_late(self, record: VersionRecord, evidence: Evidence) -> str | None:
        """A folder whose writer knows of no generations may be meant for the current one: it is not retired unasked."""
        current = self._store.versions_of(record.run)[0].order.generation
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
