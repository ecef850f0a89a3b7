"""Brings each version that waits to its verdict: the shell around the decisions `settle` and `validate`.

`Waiting` is the queue of versions without a verdict: which is judged next, and when. `Judge` reads their files and
writes what comes of it into the store: the state, and what was learned. A verdict wakes the deltas that wait for it.
"""

import asyncio
from collections import Counter
from dataclasses import replace

import xxhash
from structlog.contextvars import bound_contextvars

from refitd.catalog.examining import Bases, Beneath, Examiner, NoReference, References
from refitd.catalog.files import DiskFiles
from refitd.policy.admit import (
    LIMITS,
    CatalogRules,
    NeverSettles,
    Settling,
    StillWritten,
    completed,
    look_of,
    settle,
    too_late,
    without_files,
)
from refitd.policy.chain import NoBase
from refitd.state.journal.journal import JournalError
from refitd.state.observer import Notifier
from refitd.state.store import Store
from refitd.state.version import VersionRecord, with_making
from refitd_client.backoff import backoff
from refitd_client.checkpoint.fault import Code
from refitd_client.checkpoint.inventory import Reference
from refitd_client.contract.manifest import Manifest, ManifestFile, TensorsSummary, fitting_fingerprints
from refitd_client.contract.states import Kind, VersionState
from refitd_client.validation.base import Base
from refitd_client.validation.foreign import lacks_manifest
from refitd_client.validation.validate import Evidence, Invalid, Options, Structure, Unknown, Valid, Verdict, validate

JUDGES = 2  # versions validated at the same time: each reads its files with several threads
RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 10.0
_NOTHING_DUE_SECONDS = 3600.0
_TENSORS_NAMED = 20  # tensors that a version leaves out, of which the record has the names
NOT_KEPT = "the service cannot keep a manifest of it"
ANNOUNCE_AGAIN = "announce the version again (the same notice: POST /v1/versions) to have it validated once more"


class Waiting:
    """The queue. The store has which versions wait; this has when each is due, in seconds of the monotonic clock.

    Attributes:
        changed: is notified when a version may be due earlier than before.
        hints: is notified when something in the root may have changed: the catalog scans it then.
        settling: what settling remembers of each version between looks.
        looks: what a notice's look has shown of its version, until that is judged for the first time.
        judging: the ids of those that are judged now: their files are being read.
    """

    def __init__(self, store: Store) -> None:
        self.changed = Notifier()
        self.hints = Notifier()
        self.settling: dict[str, Settling] = {}
        self.looks: dict[str, Structure] = {}
        self.judging: set[str] = set()
        self._store = store
        self._due: dict[str, float] = {}
        self._tries: dict[str, int] = {}
        self._alone: str | None = None

    def nudge(self, id_: str = "", look: Structure | None = None) -> None:
        """Have the root scanned, and what is due judged, soon; version `id_` at once, by `look` if there is one."""
        # The scan may have found it first, and have it wait until it has settled. Its trainer's word ends that wait.
        self._due.pop(id_, None)
        if look is not None:
            self.looks[id_] = look
        self.hints.notify()
        self.changed.notify()

    def take(self) -> list[VersionRecord]:
        """Return the versions to judge now, as many as judges are free."""
        now = self._store.clock.monotonic()
        due = [
            version
            for version in self._store.open.values()
            if version.id not in self.judging and self._due.get(version.id, 0.0) <= now
        ]
        taken = self._apart(self._in_turn(due))[: JUDGES - len(self.judging)]
        self.judging.update(version.id for version in taken)
        self._alone = next((version.id for version in taken if version.verdict.unended), self._alone)
        for version in taken:
            self._due.pop(version.id, None)
        return taken

    def _in_turn(self, due: list[VersionRecord]) -> list[VersionRecord]:
        """Order versions: runs that engines follow first, and each run's newest before any run's second.

        So no run waits for another that has many, and of a run the newest comes first: older ones may never be needed.
        """
        followed = {engine.run for engine in self._store.engines.values()}
        places = Counter[str]()
        keyed: list[tuple[bool, int, VersionRecord]] = []
        for version in sorted(due, key=lambda each: (each.order.generation, each.order.step), reverse=True):
            keyed.append((version.run not in followed, places[version.run], version))
            places[version.run] += 1
        return [version for _, _, version in sorted(keyed, key=lambda each: each[:2])]

    def _apart(self, due: list[VersionRecord]) -> list[VersionRecord]:
        """Return those that may be judged beside the ones under way.

        A version in whose validation the service died is judged alone: if the service dies again, it is that version's
        doing and no other's.
        """
        if self._alone is not None:
            return []
        others = [version for version in due if not version.verdict.unended]
        return others if others or self.judging else due[:1]

    def give_back(self, id_: str) -> None:
        self.judging.discard(id_)
        self._alone = None if self._alone == id_ else self._alone
        self.changed.notify()

    @property
    def pause(self) -> float | None:
        """Seconds until the next version is due; None where no judge is free for it."""
        if len(self.judging) >= JUDGES or self._alone is not None:
            return None
        now, waiting = self._store.clock.monotonic(), self._store.open
        dues = (
            due
            for id_, due in self._due.items()
            if id_ in waiting and id_ not in self.judging and not (self.judging and waiting[id_].verdict.unended)
        )
        return max(min(dues, default=now + _NOTHING_DUE_SECONDS) - now, 0.001)

    def at(self, id_: str, due: float = 0.0) -> None:
        """Judge a version at a time of the monotonic clock, now without one."""
        self._due[id_] = due

    def wake_handed(self) -> None:
        """Judge versions that were handed over: their files may be there, or a newer version in their place."""
        for version in self._store.open.values():
            if version.handed and version.id not in self.judging:
                self._due.pop(version.id, None)
        self.changed.notify()

    def wake_unknown(self) -> None:
        """Judge all UNKNOWN versions, the newest first: what kept them from a verdict may be over."""
        for version in self._store.versions.values():
            if version.state is VersionState.UNKNOWN:
                self.at(version.id)
        self.changed.notify()

    def later(self, id_: str) -> None:
        """Judge a version later, after a longer wait each time: each try may read everything."""
        tries = self._tries[id_] = self._tries.get(id_, 0) + 1
        self.at(id_, self._store.clock.monotonic() + backoff(tries, RETRY_SECONDS, LONGEST_RETRY_SECONDS))

    def forget(self, id_: str) -> None:
        """Forget a version that has a verdict: the next trouble with it is a first one."""
        self.settling.pop(id_, None)
        self.looks.pop(id_, None)
        self._due.pop(id_, None)
        self._tries.pop(id_, None)


class Judge:
    """Brings each version that waits to its verdict, a few at a time."""

    def __init__(
        self,
        store: Store,
        files: DiskFiles,
        references: References,
        rules: CatalogRules,
        waiting: Waiting,
        examiner: Examiner,
    ) -> None:
        self._store = store
        self._files = files
        self._examiner = examiner
        self._references = references
        self._bases = Bases(store, files)
        self._rules = rules
        self._waiting = waiting

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
            self._unknown(id_, f"cannot be read: {error}")
        except JournalError as error:
            self._unknown(id_, f"it cannot be written down that it is validated: {error}")
        except MemoryError:
            reason = "the service does not have the memory that validating it takes: give it more, then "
            self.reject(id_, reason + ANNOUNCE_AGAIN, Code.OUT_OF_MEMORY)
        finally:
            self._waiting.give_back(id_)

    async def _judge(self, record: VersionRecord) -> None:
        try:
            structure = self._waiting.looks.pop(record.id, None) or await self._files.structure(record.path)
        except FileNotFoundError:
            if not record.handed:
                raise
            ended = without_files(record, self._store.versions_of(record.run))
            if ended is not None:
                self._decide(ended)
            else:  # a notice, or the scan that finds them, wakes it before
                self._waiting.at(record.id, self._store.clock.monotonic() + LONGEST_RETRY_SECONDS)
            return
        now = self._store.clock.monotonic()
        record, manifest = self._store.versions[record.id], structure.manifest
        said = None if manifest is None or record.announced.noticed else (manifest.kind, manifest.base)
        if said is not None and said != (record.kind, record.base):
            record = replace(record, kind=said[0], base=said[1])
            self._store.put_version(record)  # from here on its base is kept
        decision = settle(
            look_of(structure, noticed=record.announced.noticed),
            self._waiting.settling.get(record.id),
            now,
            # Its trainer says that an announced one is written. A wait would only show that nothing changes. A change
            # while it is read shows in sizes, times or inodes, and the reading does not count; a store through a
            # mapping, which shows nowhere on a tmpfs, is found when it is read once more after its first load.
            settle_for=0.0 if record.announced.noticed else self._rules.settle_for,
            timeout=self._rules.settle_timeout,
        )
        match decision:
            case StillWritten(memory, until, reason):
                self._waiting.settling[record.id] = memory
                self._waiting.at(record.id, until)
                self._move(record.id, VersionState.SETTLING, reason)
            case NeverSettles(reason):
                self.reject(record.id, reason, signature=structure.signature)
            case None:
                self._waiting.settling.pop(record.id, None)
                await self._validate(record, structure)

    async def _validate(self, record: VersionRecord, seen: Structure) -> None:
        """Hold a delta against its base, every other version against the engines' model."""
        is_delta = record.kind is Kind.DELTA and self._rules.deltas
        found = self._bases.beneath(record) if is_delta else await self._references.of(record.run)
        if isinstance(found, NoBase | NoReference) and not found.final:
            self._unknown(record.id, found.reason)
            return
        if isinstance(found, NoBase):
            self.reject(record.id, found.reason, Code.WRONG_BASE)
            return
        started, waited = self._store.clock.monotonic(), self._store.since_seen(record.id)
        # Before the files are read: a start after a crash finds which version was being read.
        now = self._store.versions[record.id]
        self._store.put_version(now.having(state=VersionState.VALIDATING, reason=None, unended=now.verdict.unended + 1))
        try:
            if isinstance(found, Beneath):  # which was read before: it is looked at while the disk writes
                found, _ = await asyncio.gather(self._bases.read(found), self._store.durable())
            else:
                await self._store.durable()
            if isinstance(found, NoBase):
                self._end(record.id)
                self._unknown(record.id, found.reason)
                return
            if isinstance(found, Base) and found.inventory.pairs:
                engines = await self._references.of(record.run)
                if isinstance(engines, NoReference):
                    self._end(record.id)
                    self._unknown(record.id, engines.reason)
                    return
                found = replace(found, pairs=engines.pairs_in(found.inventory))
            model = found if isinstance(found, Reference | Base) else None
            options, evidence, verdict, proved_by = await self._examine(record, seen, model)
            # Before the journal says SEALED, and engines load it.
            verdict, described = await self._describe(record, evidence, verdict)
        except (asyncio.CancelledError, OSError, MemoryError, JournalError):
            self._end(record.id)
            raise  # any other exception takes the service down, and counts as its death
        self._end(record.id)
        record = self._store.versions[record.id]
        if options != self.options(record):
            self._again(record.id)  # what it is held against may be something else, or it was not read
            return
        took = {"seen": waited or 0.0, "validate": (self._store.clock.monotonic() - started) * 1000}
        self._conclude(record.having(proved_by=proved_by, described=described), found, evidence, verdict, took)

    async def _examine(
        self, record: VersionRecord, seen: Structure, model: Reference | Base | None
    ) -> tuple[Options, Evidence, Verdict, tuple[str, ...]]:
        """Read and judge. A notice that came meanwhile counts, and does not have the files read again."""
        options = self.options(record)
        # Ranks prove what they load by fingerprints, and nobody else needs them.
        has_ranks = any(engine.seen.plugin is not None for engine in self._store.engines_of(record.run))
        fingerprinted = has_ranks and lacks_manifest(seen)
        evidence, proved_by = await self._examiner.examine(record, seen, model, options, fingerprinted=fingerprinted)
        now = self._store.versions[record.id]
        if now.kind is record.kind and evidence.contents is not None:
            options = self.options(now)
        # In a thread: a hundred thousand tensors take 0.1 s.
        return options, evidence, await asyncio.to_thread(validate, evidence, model, options), proved_by

    async def _describe(self, record: VersionRecord, evidence: Evidence, verdict: Verdict) -> tuple[Verdict, bool]:
        """Keep a manifest of a good version that has none. Return the verdict, and whether one is kept.

        Where none can be, the version is good all the same. Servers load it as they do without refitd inside.
        """
        seen = evidence.structure
        if not isinstance(verdict, Valid) or seen is None or evidence.contents is None or not lacks_manifest(seen):
            return verdict, False
        specs = [spec for header in seen.headers.values() for spec in header.tensors.values()]
        manifest = Manifest(
            run=record.run,
            generation=record.order.generation,
            step=record.order.step,
            files={
                name: ManifestFile(size=seen.files[name].size, digest=text)
                for name, text in evidence.contents.digests.items()
            },
            tensors=TensorsSummary.of((spec.dtype, spec.end - spec.start) for spec in specs),
            fingerprints=fitting_fingerprints(evidence.contents.fingerprints),
            created_at=record.created_at,
        )
        try:
            await self._files.keep_manifest(seen, manifest)
        except OSError as error:
            note = f"{NOT_KEPT} ({error.strerror or error}): engines load it as their servers do by themselves"
            return replace(verdict, notes=(*verdict.notes, note)), False
        return verdict, True

    def _conclude(
        self,
        record: VersionRecord,
        reference: Reference | Base | NoReference,
        evidence: Evidence,
        verdict: Verdict,
        took: dict[str, float],
    ) -> None:
        looked = None if evidence.structure is None else evidence.structure.signature
        match verdict:
            case Valid() if isinstance(reference, Base) and isinstance(self._bases.record_of(record), NoBase):
                self._again(record.id)  # its base went meanwhile: the next look says so
            case Valid() if (late := too_late(record, self._store.versions_of(record.run), evidence)) is not None:
                self.reject(record.id, late, Code.OLD_GENERATION, signature=looked)
            case Valid():
                self._seal(record, verdict, evidence, took)
            case Invalid(Code.NO_REFERENCE as code, reason):
                why = reference.reason if isinstance(reference, NoReference) else reason
                self.reject(record.id, why, code, signature=looked)
            case Invalid(code, reason):
                self.reject(record.id, reason, code, signature=looked)
            case Unknown(reason):
                self._unknown(record.id, reason)

    def options(self, record: VersionRecord) -> Options:
        return Options(
            run=record.run,
            order=record.order,
            kind=record.kind if record.announced.noticed else None,
            allow_missing=record.announced.may_lack,
            allow_extra=record.announced.allow_extra,
            allow_dtype_cast=self._rules.allow_dtype_cast,
            takes=self._rules.kind,
        )

    def _move(self, id_: str, state: VersionState, reason: str | None) -> None:
        """Set a state that is no verdict: SETTLING, UNKNOWN or ANNOUNCED."""
        record = self._store.versions[id_]
        if (record.state, record.reason) != (state, reason):
            self._store.put_version(record.having(state=state, reason=reason))

    def _end(self, id_: str) -> None:
        """Note that reading has ended and the service is alive."""
        record = self._store.versions.get(id_)
        if record is not None and record.verdict.unended:
            self._store.put_version(record.having(unended=0))

    def _again(self, id_: str) -> None:
        """Judge the version again at once: what was found out does not count any more."""
        self._waiting.at(id_)
        self._move(id_, VersionState.ANNOUNCED, None)

    def _unknown(self, id_: str, reason: str) -> None:
        """Set UNKNOWN: the version could not be read, and is neither good nor bad. It is tried again."""
        self._waiting.later(id_)
        self._move(id_, VersionState.UNKNOWN, reason)

    def reject(self, id_: str, reason: str, code: Code | None = None, signature: str | None = None) -> None:
        """Set REJECTED.

        Args:
            reason: what is wrong with it, a sentence.
            code: the kind of fault, None where it was never validated.
            signature: how its files look; it is looked at again once they look otherwise. None where nobody looked.
        """
        record = self._store.versions[id_]
        self._decide(
            record.having(state=VersionState.REJECTED, reason=reason, code=code, signature=signature, unended=0)
        )

    def _decide(self, record: VersionRecord) -> None:
        self._waiting.forget(record.id)
        self._store.put_version(record, f"{record.state.lower()}: {record.reason}")
        self._wake_deltas(record.id)

    def _seal(self, record: VersionRecord, verdict: Valid, evidence: Evidence, took: dict[str, float]) -> None:
        """Set SEALED. `took` has milliseconds by stage."""
        self._waiting.forget(record.id)
        seen = evidence.structure
        notes = [*(f"proved by the GPUs of {each}" for each in record.verdict.proved_by), *verdict.notes]
        base = self._store.versions.get(record.base or "") if record.kind is Kind.DELTA else None
        names = verdict.left_out
        digest = xxhash.xxh3_128_hexdigest("\n".join(names).encode()) if names else ""
        metadata = record.announced.metadata
        if seen is not None and seen.manifest is not None:
            both = completed(record.announced.metadata, seen.manifest.metadata)
            metadata = record.announced.metadata if both is None else both
            record = with_making(record, seen.manifest)
            if both is None:
                notes.append(f"the metadata in refit.json is left out: a version's has at most {LIMITS}")
        sealed = record.having(
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
            metadata=metadata,
            timings=record.career.timings | took,
            lacks=digest if base is None else base.files.lacks,
            left_out=names[:_TENSORS_NAMED] if base is None else base.files.left_out,
            left_out_count=len(names) if base is None else base.files.left_out_count,
            notes=verdict.notes,
        )
        notes += [sealed.partly] if sealed.partly else []
        if sealed.kind is Kind.DELTA and seen is not None:
            self._bases.remember(seen)
        if record.digest not in {None, verdict.digest}:  # before engines hear that they can go there
            self._reload(record)
        self._store.put_version(sealed, "; ".join([f"sealed: {verdict.bytes} bytes in good order", *notes]))
        self._wake_deltas(record.id)

    def _reload(self, record: VersionRecord) -> None:
        """Have the engines that hold what a version was before loaded again: it has other contents now."""
        self._store.forget_fingerprints(record.id)
        for engine in list(self._store.engines.values()):
            if engine.serving == record.id:
                text = f"{record.id} has other contents now than when it was loaded: it is loaded again"
                self._store.put_engine(engine.having(reload=engine.known, reason=text), text)

    def _wake_deltas(self, base: str) -> None:
        for version in self._store.open.values():
            if version.base == base and version.state is VersionState.UNKNOWN:
                self._waiting.at(version.id)
        self._waiting.changed.notify()
