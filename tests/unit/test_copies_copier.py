"""The copier with real copies, versions and a ledger: what it does when the disk does not do as it is told."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from refitd.catalog.files import DiskFiles
from refitd.clock import SystemClock
from refitd.copies import refusals
from refitd.copies.copier import Copier
from refitd.copies.decide import Write
from refitd.copies.disk import DiskCopies
from refitd.journal.journal import Journal
from refitd.ledger import Ledger
from refitd.reclaim.collector import LedgerFacts
from refitd.reclaim.leases import DEAD_AFTER
from refitd_client.contract.states import EngineState
from support.deltas import chain, training
from support.records import engine


async def test_a_copy_that_cannot_be_deleted_is_not_forgotten_and_no_third_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "FIRST_SECONDS", 1.0)  # time to look before it is tried again
    root = tmp_path / "root"
    with training(root) as trainer:
        versions = chain(trainer, root, 4)
    journal = Journal(tmp_path / "state")
    ledger, disk = Ledger(journal, SystemClock()), DiskCopies(root)
    old = await disk.write(Write(target=versions[1], source=versions[0], deltas=(versions[1],), into=None))
    read = await disk.write(Write(target=versions[2], source=versions[0], deltas=tuple(versions[1:3]), into=None))
    for record in versions:
        ledger.put_version(record)
    gone = ledger.clock.monotonic() - DEAD_AFTER
    dead, serves = versions[1].id, versions[2].id
    ledger.put_engine(engine("x", state=EngineState.UNREACHABLE, serving=dead, unreachable_since=gone))
    ledger.put_engine(engine("y", serving=serves, model_path=f"/mnt/{read.path}", configuration="known"))
    copier = Copier(ledger, LedgerFacts(ledger, DiskFiles(root)), disk, most=2)
    assert await copier.survey()
    stray = root / ".refitd/trash"
    stray.write_text("no folder")
    tasks = [asyncio.create_task(part()) for part in (copier.run, journal.run)]
    try:
        await until(ledger, lambda: versions[3].id in ledger.carriage.refused)
        assert "no copy could make room for another" in ledger.carriage.refused[versions[3].id]
        assert {copy.path for copy in await disk.survey()} == {old.path, read.path}
        assert {line.path for line in await copier.plan()} == {old.path, read.path}, "one was forgotten"
        stray.unlink()
        async with asyncio.timeout(10):
            while ledger.carriage.path_of(versions[3]) is None:
                ledger.bell.ring()  # it looks again when something happens
                await asyncio.sleep(0.05)
        assert old.path not in {copy.path for copy in await disk.survey()}
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        journal.close()


async def until(ledger: Ledger, what: Callable[[], bool]) -> None:
    seen = ledger.bell.count
    async with asyncio.timeout(10):
        while not what():
            seen = await ledger.bell.after(seen, within=0.05)
