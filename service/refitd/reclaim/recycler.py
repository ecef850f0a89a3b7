"""Recycling: what the sweep discards becomes a slot where it may, and slots that are not needed are deleted."""

import re
from collections.abc import Callable

import structlog

from refitd.clock import Clock
from refitd.policy.spare_slots import SlotRules, SlotVerdict, newest_full, spare, why_not
from refitd.reclaim.facts import StoreFacts
from refitd.reclaim.folders import DiskFolders
from refitd.root.outcome import Discarded, Refused
from refitd.state.version import VersionRecord
from refitd_client.contract.wire import Reclaimable

_NUMBERS = re.compile(r"\d+")

log = structlog.get_logger("refitd")


class Recycler:
    """Belongs to one sweeper, which calls it in its turn."""

    def __init__(
        self, folders: DiskFolders, facts: StoreFacts, clock: Clock, rules: SlotRules, used: Callable[[], int]
    ) -> None:
        """Do nothing yet. `used` returns how many bytes of the disk budget everything but slots takes."""
        self._folders = folders
        self._facts = facts
        self._clock = clock
        self._rules = rules
        self._used = used
        self._since: dict[str, float] = {}
        self._layouts: dict[str, str | None] = {}
        self._told: set[str] = set()

    async def take_over(self, record: VersionRecord, discarded: Discarded) -> str | None:
        """Make a slot of a version that was discarded; return why not, None where it is one now."""
        refusal = await self._refusal(record)
        if refusal is None:
            # One question is enough: the version is RETIRED, so nothing begins to need it.
            found = await self._folders.hand_back(discarded, record.run)
            refusal = found.reason if isinstance(found, Refused) else None
        if refusal is None:
            return None
        kind = _NUMBERS.sub("#", refusal)  # the same reason names another version each time
        if kind not in self._told:
            self._told.add(kind)
            log.info("a version's files are not recycled", version=record.id, reason=refusal)
        return f"its files are not recycled: {refusal}"

    async def plan(self) -> list[SlotVerdict]:
        """What is to become of the slots that there are."""
        slots = await self._folders.slots()
        if not slots:
            self._since.clear()
            return []
        now = self._clock.monotonic()
        self._since = {slot.path: self._since.get(slot.path, now) for slot in slots}
        ages = {path: now - since for path, since in self._since.items()}
        newest, closed = await self._newest(), self._facts.views().closed
        return spare(slots, newest, self._rules, used=self._used(), ages=ages, closed=closed)

    async def run(self) -> list[Reclaimable]:
        """Delete the slots that are not needed, and say of each slot why it goes or stays."""
        return [await self._settle(verdict) for verdict in await self.plan()]

    async def _settle(self, verdict: SlotVerdict) -> Reclaimable:
        if not verdict.keep:
            outcome = await self._folders.withdraw(verdict.slot)
            if isinstance(outcome, Refused):
                return slot_line(SlotVerdict(verdict.slot, keep=True, reason=outcome.reason))
        return slot_line(verdict)

    async def _refusal(self, record: VersionRecord) -> str | None:
        if self._rules.off is not None:
            return self._rules.off
        if record.run in self._facts.views().closed:
            return f"run {record.run} is closed"
        layout = (await self._newest()).get(record.run)
        if layout is None:
            return f"no newer version of run {record.run} could be written into them"
        mine = [slot for slot in await self._folders.slots() if slot.run == record.run and slot.layout == layout]
        if len(mine) >= self._rules.count:
            return f"run {record.run} has {len(mine)} free slots"
        return why_not(record, self._facts.views())

    async def _newest(self) -> dict[str, str | None]:
        """The layouts of the newest versions. A version never changes, so each is looked at once."""
        newest = {version.run: version for version in newest_full(self._facts.versions())}
        known = {version.id: self._layouts.get(version.id) for version in newest.values()}
        for version in newest.values():
            if known[version.id] is None:
                known[version.id] = await self._folders.layout(version.path)
        self._layouts = known
        return {run: known[version.id] for run, version in newest.items()}


def slot_line(verdict: SlotVerdict) -> Reclaimable:
    """A slot in the plan."""
    slot = verdict.slot
    foreign = 0 if slot.ours else slot.bytes
    return Reclaimable(
        path=slot.path, keep=verdict.keep, reasons=[verdict.reason], bytes=slot.bytes, foreign_bytes=foreign
    )
