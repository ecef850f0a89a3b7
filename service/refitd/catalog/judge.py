"""Judges versions, from their first sight to the verdict: the shell around the decisions `settle` and `validate`."""

import asyncio
from dataclasses import replace

from structlog.contextvars import bound_contextvars

from refitd.catalog.files import Files
from refitd.catalog.references import Bases, NoReference, References
from refitd.catalog.verdicts import Verdicts
from refitd.catalog.waiting import Waiting
from refitd.policy.chain import NoBase
from refitd.policy.settle import CatalogRules, Complete, NeverSettles, StillWritten, look_of, settle
from refitd.state.journal.journal import JournalError
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd_client.checkpoint.fault import Code
from refitd_client.checkpoint.inventory import Reference
from refitd_client.contract.naming import Order, version_folder
from refitd_client.contract.states import Kind, VersionState
from refitd_client.validation.delta import Base
from refitd_client.validation.validate import Evidence, Invalid, Options, Structure, Unknown, Valid, Verdict, validate


class Judge:
    """Brings each version that waits to its verdict, a few at a time."""

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
        """Judge until cancelled; each version is a task of `group`."""
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
        record, manifest = self._store.versions[record.id], structure.manifest
        said = None if manifest is None or record.noticed else (manifest.kind, manifest.base)
        if said is not None and said != (record.kind, record.base):
            record = replace(record, kind=said[0], base=said[1])
            self._store.put_version(record)  # from here on its base is kept
        decision = settle(
            look_of(structure, noticed=record.noticed),
            self._waiting.settling.get(record.id),
            now,
            settle_for=0.0 if record.noticed else self._rules.settle_for,
            timeout=self._rules.settle_timeout,
        )
        match decision:
            case StillWritten(memory, until, reason):
                self._waiting.settling[record.id] = memory
                self._waiting.at(record.id, until)
                self._verdicts.move(record.id, VersionState.SETTLING, reason)
            case NeverSettles(reason):
                self._verdicts.reject(record.id, reason)
            case Complete():
                self._waiting.settling.pop(record.id, None)
                await self._validate(record, structure)

    def _await_files(self, record: VersionRecord) -> None:
        """Wait for files that a hand-over has announced. Trainers write in order: after a newer version none come."""
        newer = [version.id for version in self._store.versions_of(record.run) if version.order > record.order]
        if newer:
            self._verdicts.reject(record.id, f"its files never came: its trainer went on to {newer[0]}")
        else:
            self._waiting.for_files(record.id)

    async def _validate(self, record: VersionRecord, seen: Structure) -> None:
        """Hold a delta against its base, every other version against the engines' model."""
        is_delta = record.kind is Kind.DELTA and self._rules.deltas
        reference = await (self._bases.of(record) if is_delta else self._references.of(record.run))
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
            raise  # any other exception takes the service down, and counts as its death
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
        """Read and judge. A notice that came meanwhile counts, and does not have the files read again."""
        options = self._options(record)
        evidence = await self._files.examine(seen, model, options)
        now = self._store.versions[record.id]
        if now.kind is record.kind and evidence.contents is not None:
            options = self._options(now)
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
        """Return why a version of an earlier generation is refused, whose writer may have meant the current one."""
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
