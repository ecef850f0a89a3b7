"""A version that takes the service down with it is tried by itself, and after the third time set aside."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from refitd.clock import SystemClock
from refitd.state.journal.journal import Journal
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd_client.checkpoint.fault import Code
from refitd_client.contract.states import VersionState
from refitd_client.contract.wire import Notice
from support.catalogs import Stage, watching
from support.checkpoints import publish, tensors

ONE, TWO = "run~v000001", "run~v000002"


def begun(tmp_path: Path, *steps: int) -> None:
    """What a service leaves in its journal that was killed while it validated these steps."""
    journal = Journal(tmp_path / "state")
    store = Store(journal, SystemClock())

    async def write() -> None:
        writing = asyncio.create_task(journal.run())
        for step in steps:
            known = store.versions[f"run~v{step:06d}"]
            store.put_version(known.having(state=VersionState.VALIDATING, unended=known.verdict.unended + 1))
        await store.durable()
        writing.cancel()
        with suppress(asyncio.CancelledError):
            await writing

    asyncio.run(write())
    journal.close()


def announced(tmp_path: Path, *steps: int) -> None:
    """Versions that a service knows of and has not validated yet."""
    journal = Journal(tmp_path / "state")
    store = Store(journal, SystemClock())

    async def write() -> None:
        writing = asyncio.create_task(journal.run())
        for step in steps:
            folder = publish(tmp_path / "root", "run", step, tensors(step))
            record = VersionRecord(
                run="run", order=_order(step), path=f"run/{folder.name}", state=VersionState.ANNOUNCED, created_at=""
            ).having(noticed=True)
            store.put_version(record)
        await store.durable()
        writing.cancel()
        with suppress(asyncio.CancelledError):
            await writing

    asyncio.run(write())
    journal.close()


def _order(step: int) -> Any:
    from refitd_client.contract.naming import Order

    return Order(1, step)


@asynccontextmanager
async def looking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Stage, list[set[str]]]]:
    """The catalog at work, and which versions it reads at the same time, each time that it begins to read one."""
    from refitd.catalog.files import DiskFiles

    real, now, together = DiskFiles.examine, set[str](), list[set[str]]()

    async def examine(self: DiskFiles, seen: Any, *args: Any, **more: Any) -> Any:
        now.add(seen.path)
        together.append(set(now))
        try:
            await asyncio.sleep(0.01)
            return await real(self, seen, *args, **more)
        finally:
            now.discard(seen.path)

    monkeypatch.setattr(DiskFiles, "examine", examine)
    async with watching(tmp_path) as stage:
        yield stage, together


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_version_over_which_the_service_died_is_validated_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: int
) -> None:
    """So one that does no harm is not set aside for what another does, nor for two kills from outside."""
    announced(tmp_path, 1, 2, 3)
    for _ in range(deaths):
        begun(tmp_path, 1, 3)

    async def start() -> None:
        async with looking(tmp_path, monkeypatch) as (stage, together):
            for id_ in (ONE, TWO, "run~v000003"):
                assert (await stage.verdict(id_, VersionState.SEALED)).verdict.unended == 0
            assert together == [{"run/v000002"}, {"run/v000003"}, {"run/v000001"}]

    asyncio.run(start())


async def test_what_is_validated_is_in_the_journal_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from refitd.catalog.files import DiskFiles
    from refitd.state.journal import rows

    real, noted = DiskFiles.examine, list[int]()

    async def examine(self: DiskFiles, *args: Any, **more: Any) -> Any:
        noted.extend(record.verdict.unended for record in stage.store.journal.read(rows.read_versions))
        return await real(self, *args, **more)

    monkeypatch.setattr(DiskFiles, "examine", examine)
    async with watching(tmp_path) as stage:
        publish(stage.root, "run", 1, tensors(1))
        await stage.verdict(ONE, VersionState.SEALED)
    assert noted == [1]


async def test_a_service_that_is_stopped_has_not_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from refitd.catalog.files import DiskFiles

    async def examine(*_: Any, **__: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(DiskFiles, "examine", examine)
    async with watching(tmp_path) as stage:
        publish(stage.root, "run", 1, tensors(1))
        await stage.verdict(ONE, VersionState.VALIDATING)
        await stage.until(lambda: stage.store.versions[ONE].verdict.unended == 1)
    assert stage.store.versions[ONE].verdict.unended == 0


@pytest.mark.parametrize("where", ["structure", "examine"])
async def test_a_version_for_which_there_is_no_memory_is_rejected_and_the_service_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    from refitd.catalog.files import DiskFiles

    real = getattr(DiskFiles, where)

    async def fails(self: DiskFiles, seen: Any, *args: Any, **more: Any) -> Any:
        if "v000001" in (seen if isinstance(seen, str) else seen.path):
            raise MemoryError
        return await real(self, seen, *args, **more)

    monkeypatch.setattr(DiskFiles, where, fails)
    async with watching(tmp_path) as stage:
        publish(stage.root, "run", 1, tensors(1))
        found = await stage.verdict(ONE, VersionState.REJECTED)
        assert (found.verdict.code, found.verdict.unended) == (Code.OUT_OF_MEMORY, 0)
        assert "does not have the memory" in (found.reason or "")
        publish(stage.root, "run", 2, tensors(2))
        await stage.verdict(TWO, VersionState.SEALED)
        monkeypatch.setattr(DiskFiles, where, real)
        await stage.intake.take(Notice(run="run", step=1))
        await stage.verdict(ONE, VersionState.SEALED)
