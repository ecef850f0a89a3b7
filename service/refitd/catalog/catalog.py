"""The catalog: which versions exist, and which are good.

One loop lists the root, at each hint and from time to time: new directories become versions (`arrivals`), sealed
ones that have changed or gone become LOST (`sightings`). Another brings each version to its verdict (`judge`), of
which it takes the next from `waiting` and writes down what came out by `verdicts`. A third wakes the versions that
wait for a model to be held against.
"""

import asyncio
import math
from dataclasses import replace

from refitd.catalog.arrivals import Arrivals
from refitd.catalog.files import Files
from refitd.catalog.judge import Judge
from refitd.catalog.references import References
from refitd.catalog.sightings import Sightings
from refitd.catalog.verdicts import Verdicts
from refitd.catalog.waiting import Waiting
from refitd.policy.rules import CatalogRules
from refitd.root.scan import ListingFailed
from refitd.state.notifier import Notifier
from refitd.state.store import Store
from refitd_client.checkpoint.fault import Code
from refitd_client.contract.states import VersionState

PACE_SECONDS = 0.02  # between two scans: a burst of hints is one hint
MOST_DEATHS = 2  # of the service, while it validated a version


class Catalog:
    """Brings versions from their first sight to a verdict. `check` says whether a sealed one is still what it was.

    `judging` names the versions that are looked at now.
    """

    def __init__(self, store: Store, files: Files, references: References, rules: CatalogRules) -> None:
        self._store = store
        self._files = files
        self._rules = rules
        self._hints = Notifier()
        self._waiting = Waiting(store)
        self._verdicts = verdicts = Verdicts(store, self._waiting)
        self._arrivals = Arrivals(store, rules, self._waiting)
        self._sightings = Sightings(store, files, self._waiting, verdicts, self._arrivals)
        self._judge = Judge(store, files, references, rules, self._waiting, verdicts)
        self.check = self._sightings.check
        self.judging = self._waiting.judging

    def nudge(self) -> None:
        """Look again, soon."""
        self._hints.notify()
        self._waiting.changed.notify()

    async def run(self) -> None:
        """Scan and judge until cancelled."""
        self._reconsider()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._scan_forever(), name="scan")
            group.create_task(self._judge.run(group), name="judge")
            group.create_task(self._hear_of_models(), name="models")

    def _reconsider(self) -> None:
        """What was REJECTED for want of a model to hold it against: this start may have been given one. What the
        service validated when it died: once that may have had other causes, and twice it is set aside.
        """
        for version in list(self._store.versions.values()):
            if version.unended >= MOST_DEATHS:
                self._verdicts.set_aside(version)
            elif version.unended:
                text = "the service died while it validated this version: it is validated again, by itself"
                self._store.say("version", version.id, text)
            elif version.state is VersionState.REJECTED and version.code is Code.NO_REFERENCE:
                again = replace(version, state=VersionState.ANNOUNCED, reason=None, code=None)
                self._store.put_version(again, "looked at again: there may be a model to hold it against now")

    async def _hear_of_models(self) -> None:
        """Versions that waited for an engine to say which model it serves are judged together when one does.

        Were each judged when its next try is due, an old one could be the first, and engines would go back to it.
        """
        heard = self._store.models_changed.count
        while True:
            heard = await self._store.models_changed.wait_after(heard)
            self._waiting.wake_unknown()

    async def _scan_forever(self) -> None:
        looked = -math.inf
        while True:
            seen = self._hints.count
            is_listed = await self._scan()
            now = self._store.clock.monotonic()
            if is_listed and now - looked >= self._rules.scan_interval:  # a hint says that something came, not went
                await self._sightings.look_again()
                looked = now
            await asyncio.sleep(PACE_SECONDS)
            await self._hints.wait_after(seen, within=self._rules.scan_interval)

    async def _scan(self) -> bool:
        listing = await self._files.scan()
        if isinstance(listing, ListingFailed):
            self._store.faults.set_root(listing.reason)
            return False
        self._store.faults.set_root(None)
        await self._arrivals.meet_all(listing.found)
        self._waiting.wake_handed()
        return True
