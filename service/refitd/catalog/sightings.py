"""Whether the files of versions that are known are still what they were: sealed ones get lost, and are found again."""

import asyncio
from dataclasses import replace

from refitd.catalog.arrivals import Arrivals
from refitd.catalog.files import Files, Unreadable
from refitd.catalog.verdicts import Verdicts
from refitd.catalog.waiting import Waiting
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd_client.contract.states import VersionState
from refitd_client.validation.conventions import is_foreign

_WATCHED = frozenset({VersionState.SEALED, VersionState.LOST})


class Sightings:
    """Looks at their files again."""

    def __init__(self, store: Store, files: Files, waiting: Waiting, verdicts: Verdicts, arrivals: Arrivals) -> None:
        self._store = store
        self._files = files
        self._waiting = waiting
        self._verdicts = verdicts
        self._arrivals = arrivals
        self._rejected_as: dict[str, str] = {}  # what rejected folders looked like when they were first seen again
        self._looks: dict[str, asyncio.Task[dict[str, str | Unreadable | None]]] = {}

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

    async def look_again(self) -> None:
        """Whether what is sealed is still as it was, and what is not judged yet is still there."""
        versions = [v for v in self._store.versions.values() if v.state in _WATCHED or v.state.is_open or _may_heal(v)]
        signatures = await self._files.signatures([version.path for version in versions])
        for version in versions:
            if self._store.versions.get(version.id) is version and not self._waiting.is_busy(version.id):
                self._seen(version, signatures[version.path])
            # Else something happened to it meanwhile: the next scan looks at it.

    def _seen(self, version: VersionRecord, found: str | Unreadable | None) -> None:
        if version.state is VersionState.LOST:
            self._find_again(version, found)
            if isinstance(found, str) and is_foreign(version.path) and not version.noticed:
                self._arrivals.rewritten(version, found)
        elif version.state is VersionState.REJECTED:
            self._judge_again(version, found)
        elif version.state is not VersionState.SEALED:
            if found is None and not version.handed:
                self._verdicts.reject(version.id, f"{version.path} was taken away before it could be checked")
        elif found != version.signature and not isinstance(found, Unreadable):
            self._lose(version, gone=found is None)

    def _lose(self, record: VersionRecord, *, gone: bool) -> None:
        reason = f"{record.path} {'is gone' if gone else 'has changed'} since it was checked: publish the step again"
        current = self._store.versions.get(record.id)
        if current is not None and current.state is VersionState.SEALED:
            self._store.put_version(replace(current, state=VersionState.LOST, reason=reason), f"lost: {reason}")

    def _find_again(self, record: VersionRecord, found: str | Unreadable | None) -> None:
        """The very files that were checked are back in their place: a folder was moved away and back again."""
        if found == record.signature:
            sealed = replace(record, state=VersionState.SEALED, reason=None)
            self._store.put_version(sealed, f"sealed: {record.path} is back, unchanged")

    def _judge_again(self, record: VersionRecord, found: str | Unreadable | None) -> None:
        """A trainer's own folder was rejected, and is not what it was: it was not finished, or was written again."""
        seen = self._rejected_as.setdefault(record.id, found) if isinstance(found, str) else found
        if isinstance(found, str) and seen != found:
            again = replace(record, state=VersionState.ANNOUNCED, reason=None, code=None)
            self._rejected_as.pop(record.id)
            self._store.put_version(again, f"looked at again: {record.path} has changed since it was rejected")
            self._waiting.changed.notify()


def _may_heal(version: VersionRecord) -> bool:
    """A rejected folder of a trainer's own, which nobody announces again when it is mended."""
    return version.state is VersionState.REJECTED and is_foreign(version.path) and not version.noticed
