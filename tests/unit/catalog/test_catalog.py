"""The catalog at work: real files, a real journal, a base model to hold checkpoints against."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from refitd.catalog.files import DiskFiles
from refitd_client.checkpoint.fault import Code
from refitd_client.contract.states import VersionState
from refitd_client.contract.wire import Notice
from refitd_client.validation.validate import Evidence, Structure
from support.catalogs import watching
from support.checkpoints import publish, tensors, write_shards


async def test_a_notice_that_comes_after_the_watch_may_still_allow_missing_tensors(tmp_path: Path) -> None:
    async with watching(tmp_path) as stage:
        weights = tensors(1)
        del weights["layer.1.weight"]
        publish(stage.root, "run", 1, weights)
        await stage.verdict("run~v000001", VersionState.REJECTED)
        await stage.intake.take(Notice(run="run", step=1, allow_missing=["layer.1.*"]))
        await stage.verdict("run~v000001", VersionState.SEALED)


async def test_a_notice_that_comes_while_its_version_is_read_has_it_judged_anew_and_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every version that its trainer publishes is such a one: the watch sees it before the notice is there."""
    examine, reading, told = DiskFiles.examine, asyncio.Event(), asyncio.Event()
    reads: list[str] = []

    async def slow(files: DiskFiles, seen: Structure, *args: Any, **more: Any) -> Evidence:
        reads.append(seen.path)
        evidence = await examine(files, seen, *args, **more)
        reading.set()
        await told.wait()
        return evidence

    monkeypatch.setattr(DiskFiles, "examine", slow)
    async with watching(tmp_path) as stage:
        publish(stage.root, "run", 1, tensors(1))
        await reading.wait()
        await stage.intake.take(Notice(run="run", step=1, allow_missing=["layer.1.*"]))
        told.set()
        await stage.verdict("run~v000001", VersionState.SEALED)
    assert reads == ["run/v000001"]


async def test_a_folder_of_an_old_generation_that_nobody_ordered_is_refused_by_name_and_not_deleted(
    tmp_path: Path,
) -> None:
    """A trainer without the SDK writes step 50 in a run that was restarted: its folder has no suffix."""
    async with watching(tmp_path) as stage:
        publish(stage.root, "run", 41, tensors(1), generation=4)
        await stage.verdict("run~v000041.g4", VersionState.SEALED)
        write_shards(stage.root / "run/v000050", tensors(2))
        late = await stage.verdict("run~v000050", VersionState.REJECTED)
        assert late.verdict.code is Code.OLD_GENERATION
        assert "call it v000050.g4" in (late.reason or "")
        publish(stage.root, "run", 40, tensors(3))
        assert (await stage.verdict("run~v000040", VersionState.SEALED)).files.owned
