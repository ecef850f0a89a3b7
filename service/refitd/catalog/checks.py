"""Compares the files of known versions with what they were, and reads those again that look otherwise.

What a folder looks like from outside (names, sizes, times, inodes) is cheap to ask, before each load and at each scan,
and proves nothing: a backup that is put back has other inodes, a touch has other times, and the bytes are the same. So
another look is a reason to read a version again, and its digest decides:

    the digest that it had              it is SEALED, as it looks now; also one that was LOST
    another, without a manifest         its trainer had not written it to its end: it is judged again, as it is now
    another, or files do not fit        it is LOST

Nothing is loaded from a version while it is read again. A store through a mapping changes no time on a tmpfs. So a
version without a manifest, whose digest nobody but this service knows, is also read once more after its first load.

One version is read at a time. One that keeps changing takes at most a tenth of the time (`_PAUSES`).
"""

import asyncio
from collections.abc import Callable

from refitd.catalog.files import DiskFiles, Unreadable
from refitd.catalog.judge import LONGEST_RETRY_SECONDS, RETRY_SECONDS, Judge, Waiting
from refitd.policy.admit import CatalogRules
from refitd.state.observer import Notifier
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd_client.contract.states import VersionState
from refitd_client.validation.examine import ReadAgain
from refitd_client.validation.foreign import is_foreign

_PAUSES = 9  # times as long as a reading took, the same version is not read again
_AFTER_LOAD = 5  # times `settle_for`: so long after its first load a version without a manifest is read once more


class FileChecks:
    """Looks at known versions, and reads again what looks otherwise than it did."""

    def __init__(
        self,
        store: Store,
        files: DiskFiles,
        rules: CatalogRules,
        waiting: Waiting,
        judge: Judge,
        rewritten: Callable[[VersionRecord], None],
    ) -> None:
        """Do nothing yet. `rewritten` takes the new contents of a LOST folder of a trainer's own format."""
        self._store = store
        self._files = files
        self._rules = rules
        self._waiting = waiting
        self._judge = judge
        self._rewritten = rewritten
        self._lost_as: dict[str, str] = {}  # signatures of lost folders that were read again, and had other contents
        self._due: dict[str, float] = {}  # when versions may be read again, in seconds of the monotonic clock
        self._changed = Notifier()
        self._checks: dict[str, asyncio.Task[dict[str, str | Unreadable | None]]] = {}

    async def check(self, record: VersionRecord, *, in_place: bool = False) -> bool:
        """Return whether a version's files look as they did when they were found good; have them read again if not.

        A delta that an engine writes into what it serves is read from these files too: `in_place` changes nothing.
        Engines that ask at the same time share one look: a fleet's updates then also share one write of the journal.
        """
        check = self._checks.get(record.path)
        if check is None:
            check = self._checks[record.path] = asyncio.create_task(self._files.signatures([record.path]))
            check.add_done_callback(lambda _: self._checks.pop(record.path))
        found = (await asyncio.shield(check))[record.path]  # one engine that is cancelled stops no other's check
        current = self._store.versions.get(record.id)
        if current is not None and current.state is VersionState.SEALED:
            self._compare(current, found)
        return found == record.files.signature

    async def check_all(self) -> None:
        """Check sealed and lost versions, those without a verdict, and rejected folders that may have been mended."""
        versions = [
            each
            for each in self._store.versions.values()
            if each.state.may_be_target
            or each.state.is_open
            # A rejected folder of a trainer's own format: no notice says that it was mended.
            or (each.state is VersionState.REJECTED and is_foreign(each.path) and not each.announced.noticed)
        ]
        signatures = await self._files.signatures([version.path for version in versions])
        self._due = {id_: due for id_, due in self._due.items() if id_ in self._store.versions}
        for version in versions:
            if self._store.versions.get(version.id) is version and version.id not in self._waiting.judging:
                self._compare(version, signatures[version.path])
            # Else something happened to it meanwhile: the next scan checks it.

    def _compare(self, version: VersionRecord, found: str | Unreadable | None) -> None:
        if isinstance(found, Unreadable):
            return
        match version.state:
            case VersionState.SEALED:
                self._compare_sealed(version, found)
            case VersionState.LOST:
                self._compare_lost(version, found)
            case VersionState.REJECTED:
                if None not in {found, version.files.signature} and found != version.files.signature:
                    self._judge_again(version, f"looked at again: {version.path} has changed since it was rejected")
            case _:
                if found is None and not version.handed:
                    self._judge.reject(version.id, f"{version.path} was taken away before it could be checked")

    def _compare_sealed(self, version: VersionRecord, found: str | None) -> None:
        if found is None:
            self._lose(version, f"{version.path} is gone since it was checked: publish the step again")
        elif found != version.files.signature:
            self._doubt(version, f"{version.path} has changed since it was checked: it is read again")
        elif version.verdict.in_doubt:
            self._store.put_version(version.having(in_doubt=False))  # it looks as it did before
        elif _is_to_confirm(version) and version.id not in self._due:
            self._due[version.id] = self._store.clock.monotonic() + _AFTER_LOAD * self._rules.settle_for
            self._changed.notify()

    def _compare_lost(self, version: VersionRecord, found: str | None) -> None:
        if found is None:
            if version.verdict.in_doubt:
                self._store.put_version(version.having(in_doubt=False))
        elif found == version.files.signature:
            self._keep(version, found, f"sealed: {version.path} is back, unchanged")
        elif found != self._lost_as.get(version.id) and not self._is_replaced(version):
            self._doubt(version, f"{version.path} is there, and looks otherwise than it did: it is read again")

    def _is_replaced(self, version: VersionRecord) -> bool:
        """Return whether a newer version lies in the folder, as where a trainer of another format was restarted."""
        mine = self._store.versions_of(version.run)
        return any(each.path == version.path and each.order > version.order for each in mine)

    def _doubt(self, version: VersionRecord, text: str) -> None:
        if not version.verdict.in_doubt:
            self._store.put_version(version.having(in_doubt=True), text)
        self._changed.notify()

    def _keep(self, version: VersionRecord, signature: str, text: str | None) -> None:
        self._lost_as.pop(version.id, None)
        reason = None if version.state is VersionState.LOST else version.reason
        state, confirmed = VersionState.SEALED, _is_to_confirm(version) or version.verdict.confirmed
        kept = version.having(state=state, reason=reason, signature=signature, in_doubt=False, confirmed=confirmed)
        self._store.put_version(kept, text)

    def _lose(self, version: VersionRecord, reason: str) -> None:
        lost = version.having(state=VersionState.LOST, reason=reason, in_doubt=False)
        self._store.put_version(lost, f"lost: {reason}")

    def _judge_again(self, version: VersionRecord, text: str) -> None:
        again = version.having(state=VersionState.ANNOUNCED, reason=None, code=None, in_doubt=False, confirmed=False)
        self._due.pop(version.id, None)
        self._store.put_version(again, text)
        self._waiting.at(version.id)
        self._waiting.changed.notify()

    async def run(self) -> None:
        """Read again what has changed, one version after the other, until cancelled."""
        while True:
            seen, now = self._changed.count, self._store.clock.monotonic()
            wanted = [version for version in self._store.versions.values() if self._is_wanted(version)]
            due = [version for version in wanted if self._due.get(version.id, 0.0) <= now]
            if due:  # what engines cannot load meanwhile comes first, and the newest of that
                await self._read_again(max(due, key=lambda version: (version.verdict.in_doubt, version.order)))
            else:
                soonest = min((self._due[version.id] for version in wanted), default=None)
                await self._changed.wait_after(seen, within=None if soonest is None else soonest - now)

    def _is_wanted(self, version: VersionRecord) -> bool:
        if not version.state.may_be_target:
            return False
        return version.verdict.in_doubt or (_is_to_confirm(version) and version.id in self._due)

    async def _read_again(self, version: VersionRecord) -> None:
        began, retry, is_kept = self._store.clock.monotonic(), LONGEST_RETRY_SECONDS, True
        try:
            found = await self._files.read_again(version.path)
            if version.files.described and found.digest == version.digest:
                is_kept = await self._signed(version.path, found.signature)
            retry = RETRY_SECONDS
        except FileNotFoundError:  # the next scan says what became of it
            found = None
        except OSError:
            found = None
        now = self._store.clock.monotonic()
        self._due[version.id] = now + max(retry, _PAUSES * (now - began))
        current = self._store.versions.get(version.id)
        if current is None or found is None or not current.state.may_be_target or current.digest != version.digest:
            return  # what happened to it meanwhile counts
        if is_kept:
            self._conclude(current, found)
        else:
            self._judge_again(current, f"the service's manifest of {version.path} is gone: it is judged again")

    async def _signed(self, path: str, signature: str) -> bool:
        """Have the kept manifest count for the files as they look now; False where it is gone."""
        try:
            await self._files.sign_manifest(path, signature)
        except FileNotFoundError:
            return False
        return True

    def _written_over_by(self, version: VersionRecord) -> str | None:
        """The id of a later version that its trainer has written into the same folder; None where there is none. What
        is there is not this version then, however good it is.
        """
        others = (each for each in self._store.versions_of(version.run) if each.path == version.path)
        return next((each.id for each in others if each.order > version.order), None)

    def _conclude(self, version: VersionRecord, found: ReadAgain) -> None:
        path, is_new = version.path, is_foreign(version.path) and not version.announced.noticed
        over = self._written_over_by(version)
        if found.digest is not None and found.digest == version.digest:
            text = (
                f"sealed: {path} was read again, and has the contents that it had" if version.verdict.in_doubt else None
            )
            self._keep(version, found.signature, text)
        elif found.digest is not None and not version.files.owned and not is_new and over is None:
            text = f"{path} has other contents than when it was sealed, so it was not written to its end then"
            self._judge_again(version, f"{text}: it is judged again")
        else:
            self._lost_as[version.id] = found.signature
            # Of contents that changed without a trace the look is the same: it must not pass for them being back.
            lost = version.having(signature=None)
            why = found.fault or "it was read again, and has other contents"
            why = why if over is None else f"{over} was written over it: each step needs a folder of its own"
            if version.state is VersionState.LOST:
                self._store.put_version(lost.having(in_doubt=False))
            else:
                self._lose(lost, f"{path} has changed since it was checked ({why}): publish the step again")
            if is_new and found.digest is not None and over is None:
                self._rewritten(version)


def _is_to_confirm(version: VersionRecord) -> bool:
    """Whether a version is to be read once more since it was loaded."""
    return not version.files.owned and not version.verdict.confirmed and version.served_at is not None
