"""The catalog: which versions exist, and which are good.

One loop lists the root, at each hint and from time to time: new folders become versions, sealed ones that have changed
or gone become LOST (`arrivals`). Another (`judge`) brings each version that is due (`waiting`) to its verdict
(`verdicts`). A third wakes the versions that wait for a model to be held against.
"""

import asyncio
import math
from dataclasses import replace

from refitd.catalog.arrivals import Arrivals, FileChecks
from refitd.catalog.files import Files
from refitd.catalog.judge import Judge
from refitd.catalog.references import References
from refitd.catalog.verdicts import Verdicts
from refitd.catalog.waiting import Waiting
from refitd.policy.settle import CatalogRules
from refitd.root.scan import ListingFailed
from refitd.state.observer import Notifier
from refitd.state.store import Store
from refitd_client.checkpoint.fault import Code
from refitd_client.contract.states import VersionState

PACE_SECONDS = 0.02  # between two scans: a burst of hints is one hint
MOST_DEATHS = 2  # of the service, while it validated a version


class Catalog:
    """Brings versions from their first sight to a verdict.

    `check` says whether a sealed version is still what it was. `judging` has the ids of those being validated.
    """

    def __init__(self, store: Store, files: Files, references: References, rules: CatalogRules) -> None:
        self._store = store
        self._files = files
        self._rules = rules
        self._hints = Notifier()
        self._waiting = Waiting(store)
        self._verdicts = verdicts = Verdicts(store, self._waiting)
        self._arrivals = Arrivals(store, rules, self._waiting)
        self._checks = FileChecks(store, files, self._waiting, verdicts, self._arrivals)
        self._judge = Judge(store, files, references, rules, self._waiting, verdicts)
        self.check = self._checks.check
        self.judging = self._waiting.judging

    def nudge(self) -> None:
        """Scan again, soon."""
        self._hints.notify()
        self._waiting.changed.notify()

    async def run(self) -> None:
        """Scan and judge until cancelled."""
        self._reconsider()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._scan_forever(), name="scan")
            group.create_task(self._judge.run(group), name="judge")
            group.create_task(self._wake_when_models_come(), name="models")

    def _reconsider(self) -> None:
        """Look at verdicts that a new start may change.

        This start may have been given a model, for want of which versions were REJECTED. A version that was being
        validated when the service died is validated once more; after the second death it is set aside.
        """
        for version in list(self._store.versions.values()):
            if version.unended >= MOST_DEATHS:
                self._verdicts.set_aside(version.id)
            elif version.unended:
                text = "the service died while it validated this version: it is validated again, by itself"
                self._store.say("version", version.id, text)
            elif version.state is VersionState.REJECTED and version.code is Code.NO_REFERENCE:
                again = replace(version, state=VersionState.ANNOUNCED, reason=None, code=None)
                self._store.put_version(again, "looked at again: there may be a model to hold it against now")

    async def _wake_when_models_come(self) -> None:
        """Judge versions that waited for an engine's model together, when it comes.

        Were each judged when its next try is due, an old one could be the first, and engines would go back to it.
        """
        seen = self._store.models_changed.count
        while True:
            seen = await self._store.models_changed.wait_after(seen)
            self._waiting.wake_unknown()

    async def _scan_forever(self) -> None:
        checked_at = -math.inf
        while True:
            seen = self._hints.count
            listing = await self._files.scan()
            if isinstance(listing, ListingFailed):
                self._store.faults.set_root(listing.reason)
            else:
                self._store.faults.set_root(None)
                await self._arrivals.take_in(listing.found)
                self._waiting.wake_handed()
                now = self._store.clock.monotonic()
                if now - checked_at >= self._rules.scan_interval:  # a hint says that something came, not went
                    await self._checks.check_all()
                    checked_at = now
            await asyncio.sleep(PACE_SECONDS)
            await self._hints.wait_after(seen, within=self._rules.scan_interval)
