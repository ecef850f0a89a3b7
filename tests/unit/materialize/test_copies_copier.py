"""The materializer with real copies, versions and a store: what it does when the disk does not do as it is told."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from refitd.catalog.files import DiskFiles
from refitd.clock import SystemClock
from refitd.materialize import materializer as materializing
from refitd.materialize.disk import DiskCopies
from refitd.materialize.materializer import Materializer
from refitd.policy.leases import DEAD_AFTER
from refitd.policy.materialize import WriteCopy
from refitd.reclaim.facts import StoreFacts
from refitd.state.journal.journal import Journal
from refitd.state.store import Store
from refitd.update.targets import Targets
from refitd_client.contract.states import EngineState
from support.deltas import chain, training
from support.records import engine


async def test_a_copy_that_cannot_be_deleted_is_not_forgotten_and_no_third_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(materializing, "FIRST_RETRY_SECONDS", 1.0)  # time to look before it is tried again
    root = tmp_path / "root"
    with training(root) as trainer:
        versions = chain(trainer, root, 4)
    journal = Journal(tmp_path / "state")
    store, disk = Store(journal, SystemClock()), DiskCopies(root)
    targets = Targets(store)
    old = await disk.write(WriteCopy(target=versions[1], source=versions[0], deltas=(versions[1],), into=None))
    read = await disk.write(WriteCopy(target=versions[2], source=versions[0], deltas=tuple(versions[1:3]), into=None))
    for record in versions:
        store.put_version(record)
    gone = store.clock.monotonic() - DEAD_AFTER
    dead, serves = versions[1].id, versions[2].id
    store.put_engine(engine("x", state=EngineState.UNREACHABLE, serving=dead, unreachable_since=gone))
    store.put_engine(engine("y", serving=serves, model_path=f"/mnt/{read.path}", configuration="known"))
    materializer = Materializer(store, targets, StoreFacts(store, targets, DiskFiles(root)), disk, most=2)
    assert await materializer.survey()
    stray = root / ".refitd/trash"
    stray.write_text("no folder")
    tasks = [asyncio.create_task(part()) for part in (materializer.run, journal.run)]
    try:
        await until(store, lambda: versions[3].id in targets.carriage.refused)
        assert "no copy could make room for another" in targets.carriage.refused[versions[3].id]
        assert {copy.path for copy in await disk.survey()} == {old.path, read.path}
        assert {line.path for line in await materializer.plan()} == {old.path, read.path}, "one was forgotten"
        assert materializer.bytes_on_root == old.bytes + read.bytes > 0
        stray.unlink()
        async with asyncio.timeout(10):
            while targets.carriage.path_of(versions[3]) is None:
                store.changed.notify()  # it looks again when something happens
                await asyncio.sleep(0.05)
        assert old.path not in {copy.path for copy in await disk.survey()}
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        journal.close()


async def until(store: Store, what: Callable[[], bool]) -> None:
    seen = store.changed.count
    async with asyncio.timeout(10):
        while not what():
            seen = await store.changed.wait_after(seen, within=0.05)
