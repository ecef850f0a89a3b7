"""Repairs, behind the root's lock, over the service's own store and trash: what it does at start, fsck does now.

Nothing is deleted but by the code that deletes in the service, which looks again right before; nothing that might be
evidence is overwritten: a corrupt journal is moved aside.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import assert_never

from refitd.catalog.files import DiskFiles
from refitd.clock import SystemClock
from refitd.diagnose.fsck.disagreement import Disagreement, FsckKind, Repair
from refitd.diagnose.fsck.opening import opened
from refitd.diagnose.roster import Roster
from refitd.materialize.disk import DiskCopies
from refitd.policy.holdings import Holdings
from refitd.policy.leases import leases
from refitd.reclaim.facts import StoreFacts
from refitd.reclaim.folders import DiskFolders
from refitd.root.outcome import Refused
from refitd.settings import Settings
from refitd.state.journal.journal import JournalError
from refitd.state.records import EngineRecord
from refitd.state.store import Store
from refitd.update.targets import Targets
from refitd_client.contract.states import EngineState, VersionState


async def mend(settings: Settings, findings: Sequence[Disagreement], roster: Roster) -> list[Disagreement]:
    """Carry out the repairs of findings; return all findings with what became of them.

    The root's lock must be held.

    Raises:
        StartRefusedError: the journal cannot be opened.
    """
    if all(finding.repair is None for finding in findings):
        return list(findings)
    async with opened(settings) as (journal, epoch):
        store = await asyncio.to_thread(Store, journal, SystemClock(), epoch)  # closes the attempts that were open
        writing = asyncio.create_task(journal.run())
        try:
            mender = Mender(settings, store, roster)
            mended = [await mender.mend(finding) for finding in findings]
            await store.durable()
            return mended
        finally:
            writing.cancel()
            await asyncio.wait({writing})


class Mender:
    """Carries out one repair at a time."""

    def __init__(self, settings: Settings, store: Store, roster: Roster) -> None:
        root = settings.root.resolve()
        self._store = store
        self._roster = roster
        self._folders = DiskFolders(root)
        self._copies = DiskCopies(root, settings.copies_folder)
        self._facts = StoreFacts(store, Targets(store), DiskFiles(root))
        self._incoming_ttl = settings.incoming_ttl

    async def mend(self, finding: Disagreement) -> Disagreement:
        """Carry out the repair of a finding, if it has one."""
        if finding.repair is None:
            return finding
        try:
            trouble = await self._mend(finding.repair, finding)
            await self._store.durable()
        except (OSError, JournalError) as error:
            trouble = str(error)
        return replace(finding, repaired=trouble is None, outcome=trouble)

    async def _mend(self, repair: Repair, finding: Disagreement) -> str | None:
        subject = finding.subject
        match repair:
            case Repair.REBUILD_JOURNAL | Repair.CLOSE_ATTEMPT:
                return None  # opening the journal and reading it back has done that
            case Repair.MARK_LOST:
                return self._mark_lost(subject, finding)
            case Repair.FORGET_SERVING:
                return self._put(subject, serving=None, reason=finding.text)
            case Repair.TAINT:
                return self._put(subject, serving=None, known=False, state=EngineState.TAINTED, reason=finding.text)
            case Repair.DROP_LEASES:
                unproven = self._store.engines[subject].unproven if subject in self._store.engines else ()
                return self._put(subject, unproven=tuple(v for v in unproven if v in self._store.versions))
            case Repair.RESUME:
                return await self._resume(subject)
            case Repair.FINISH_RECLAIM:
                return await self._finish_reclaim(subject)
            case Repair.DISCARD_INCOMING | Repair.DISCARD_SLOT | Repair.EMPTY_TRASH:
                return await self._tidy(repair, subject)
            case Repair.DISOWN_COPY:
                return await self._disown(subject)
            case _:
                assert_never(repair)

    async def _disown(self, path: str) -> str | None:
        for copy in await self._copies.survey():
            if copy.path == path:
                await self._copies.disown(copy)
        return None

    def _mark_lost(self, version: str, finding: Disagreement) -> str | None:
        record = self._store.versions[version]
        lost = replace(record, state=VersionState.LOST, reason=finding.text)
        if finding.kind is FsckKind.VERSION_DAMAGED:
            # Its signature is unchanged: without this the catalog would take its files for found again.
            lost = replace(lost, signature=f"damaged {record.signature}")
        self._store.put_version(lost, f"lost: {finding.text}")
        return None

    def _put(self, engine: str, **changes: object) -> str | None:
        record = self._store.engines.get(engine)
        if record is None:
            return "the journal does not know it any more"
        changed: EngineRecord = replace(record, **changes)  # type: ignore[arg-type]
        self._store.put_engine(changed, f"fsck: {changed.reason}" if "reason" in changes else None)
        return None

    async def _resume(self, name: str) -> str | None:
        engine = self._roster.connect(name)
        try:
            return None if await engine.resume() else "the engine did not answer the call that resumes it"
        finally:
            await engine.aclose()

    async def _tidy(self, repair: Repair, path: str) -> str | None:
        """Take away what lies about, and empty the trash."""
        if repair is Repair.DISCARD_INCOMING:
            outcome = await self._folders.discard_abandoned(path, self._incoming_ttl)
            return outcome.reason if isinstance(outcome, Refused) else None
        refused = await self._discard_slot(path) if repair is Repair.DISCARD_SLOT else None
        return refused or "; ".join((await self._folders.empty()).left) or None

    async def _discard_slot(self, path: str) -> str | None:
        """Look once more: a publisher may have taken it, if it was worth taking."""
        for slot in await self._folders.slots():
            if slot.path == path and slot.fault is not None and slot.ours:
                outcome = await self._folders.withdraw(slot)
                return outcome.reason if isinstance(outcome, Refused) else None
        return None

    async def _finish_reclaim(self, version: str) -> str | None:
        """The rest of a deletion: the folder into the trash, and the version out of the books."""
        record = self._store.versions[version]
        if held := leases(self._facts.views()).get(version):
            return f"it stays: {held[0]}"
        if record.pinned:
            return "it stays: it is pinned"
        folder = await self._folders.examine(record.path)
        outcome = folder
        if isinstance(folder, Holdings) and folder.files:
            outcome = await self._folders.discard(record.path, folder)
        if isinstance(outcome, Refused):
            return outcome.reason
        self._store.put_version(replace(record, state=VersionState.DELETED), "deleted")
        left = (await self._folders.empty()).left
        return "; ".join(left) or None
