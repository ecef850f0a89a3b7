"""The catalog at work on real files, with a real journal and a base model to hold checkpoints against."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from refitd.catalog.catalog import Catalog
from refitd.catalog.examining import References
from refitd.catalog.files import DiskFiles
from refitd.catalog.intake import Intake
from refitd.clock import SystemClock
from refitd.policy.admit import CatalogRules
from refitd.state.journal.journal import Journal
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.update.targets import Targets
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.contract.states import VersionState
from refitd_client.validation.foreign import Trainer

from .checkpoints import write_model

RULES = CatalogRules(scan_interval=0.02, settle_for=0.1, settle_timeout=0.4, allow_dtype_cast=False)


@dataclass
class Stage:
    """What a test works with."""

    root: Path
    store: Store
    targets: Targets
    catalog: Catalog
    intake: Intake

    async def verdict(self, id_: str, *states: VersionState) -> VersionRecord:
        """Wait until a version has one of these states."""
        await self.until(lambda: id_ in self.store.versions and self.store.versions[id_].state in states)
        return self.store.versions[id_]

    async def until(self, what: Callable[[], bool]) -> None:
        """Wait for something to become true."""
        seen = self.store.changed.count
        async with asyncio.timeout(10):
            while not what():
                seen = await self.store.changed.wait_after(seen, within=0.05)


@asynccontextmanager
async def watching(
    tmp_path: Path, *, base: bool = True, model: Path | None = None, trainers: Collection[Trainer] = ()
) -> AsyncIterator[Stage]:
    """Run the catalog on `<tmp_path>/root`. Versions are held against `model`, a small one where none is named."""
    root = tmp_path / "root"
    (root / SERVICE_FOLDER).mkdir(parents=True, exist_ok=True)
    journal = Journal(tmp_path / "state")
    store = Store(journal, SystemClock())
    targets = Targets(store)
    files = DiskFiles(root, trainers=trainers)
    references = References(store, model or write_model(tmp_path / "base") if base else None)
    catalog = Catalog(store, files, references, RULES)
    intake = Intake(store, targets, files, root, catalog.nudge, trainers=trainers)
    async with asyncio.TaskGroup() as group:
        running, writing = group.create_task(catalog.run()), group.create_task(journal.run())
        try:
            yield Stage(root, store, targets, catalog, intake)
        finally:
            running.cancel()
            await asyncio.wait({running})
            writing.cancel()
    journal.close()
