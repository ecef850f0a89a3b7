"""What a sweep reads and writes, in memory, over a real folder."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from refitd.clock import SystemClock
from refitd.policy.leases import Views
from refitd.root.scan import Listing, ListingFailed, scan
from refitd.state.version import VersionRecord
from refitd_client.contract.states import VersionState


class StoppedClock(SystemClock):
    seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds


class MemoryBooks:
    """As `Books`. `in_between` happens while they become durable."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.records: dict[str, VersionRecord] = {}
        self.seen = Views()
        self.failure: str | None = None
        self.in_between: Callable[[], None] = lambda: None
        self.log: list[str] = []
        self.deleted_ids: set[str] = set()
        (root / ".refitd").mkdir(parents=True, exist_ok=True)

    def versions(self) -> list[VersionRecord]:
        return list(self.records.values())

    def gone(self) -> set[str]:
        return self.deleted_ids

    def sized(self, version: str, size: int) -> None:
        self.records[version] = self.records[version].having(bytes=size)

    def aged(self, version: str, seconds: float) -> None:
        self.records[version] = self.records[version].having(bad_for=seconds)

    def views(self) -> Views:
        return self.seen

    async def listing(self) -> Listing | ListingFailed:
        return ListingFailed(self.failure) if self.failure else scan(self.root)

    def retire(self, record: VersionRecord, why: str) -> None:
        self.log.append(f"retire {record.order.step}")
        self.records[record.id] = self.records[record.id].having(state=VersionState.RETIRED, reason=why)

    def deleted(self, record: VersionRecord) -> None:
        self.log.append(f"deleted {record.order.step}")
        self.deleted_ids.add(record.id)
        del self.records[record.id]

    def budgeted(self, fault: str | None) -> None:
        self.fault = fault

    async def durable(self) -> None:
        await asyncio.sleep(0)
        self.in_between()
