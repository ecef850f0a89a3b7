"""How deltas come to their verdict: what is read of their bases, when, and what comes of it where that fails."""

import asyncio
import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from refitd.catalog.catalog import Arrivals
from refitd.catalog.examining import Bases, Beneath
from refitd.catalog.files import DiskFiles
from refitd.policy.chain import NoBase
from refitd.root.scan import FoundFolder
from refitd.state.version import VersionRecord
from refitd_client.contract.states import Kind, VersionState
from refitd_client.contract.wire import Notice
from refitd_client.validation.base import Base
from refitd_client.validation.examine import ReadAgain, signature
from refitd_client.validation.validate import Structure
from support.catalogs import Stage, watching
from support.deltas import RUN, Trainer, training


async def sealed(stage: Stage, trainer: Trainer, count: int) -> list[VersionRecord]:
    """Publish versions, each on the one before, as soon as that has its verdict."""
    found: list[VersionRecord] = []
    for _ in range(count):
        publication = await trainer.follow()
        trainer.base = lambda: found[-1].id
        found.append(await stage.verdict(publication.version_id, VersionState.SEALED))
    assert [each.kind for each in found] == [Kind.FULL, *[Kind.DELTA] * (count - 1)]
    return found


def counting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that are parsed from here on, not with the look that a notice has."""
    parsed: list[str] = []
    structure = DiskFiles.structure

    async def counted(files: DiskFiles, path: str) -> Structure:
        parsed.append(path)
        return await structure(files, path)

    monkeypatch.setattr(DiskFiles, "structure", counted)
    return parsed


async def announced(stage: Stage, trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> str:
    """Publish a delta that no scan finds, and announce it. Return its id."""

    async def unseen(_: Arrivals, found: Sequence[FoundFolder]) -> None:
        pass

    monkeypatch.setattr(Arrivals, "take_in", unseen)
    publication = await trainer.follow()
    base = trainer.base()
    assert isinstance(base, str)
    await stage.intake.take(Notice(run=RUN, step=trainer.step, kind=Kind.DELTA, base=base))
    return publication.version_id


async def test_a_delta_is_judged_by_the_look_at_it_that_its_notice_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = counting(monkeypatch)
    async with watching(tmp_path) as stage:
        with training(stage.root) as trainer:
            await sealed(stage, trainer, 2)
            delta = await stage.verdict(await announced(stage, trainer, monkeypatch), VersionState.SEALED)
    assert delta.path not in parsed
    assert delta.files.signature == signature(stage.root, delta.path)


async def test_a_base_is_read_while_engines_may_look_at_the_delta_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watching(tmp_path) as stage:
        read, states = Bases.read, list[VersionState]()

        async def seen(bases: Bases, beneath: Beneath) -> Base | NoBase:
            states.extend(each.state for each in stage.store.open.values())
            return await read(bases, beneath)

        monkeypatch.setattr(Bases, "read", seen)
        with training(stage.root) as trainer:
            await sealed(stage, trainer, 2)
    assert states == [VersionState.VALIDATING]


async def test_a_delta_on_a_base_that_was_touched_waits_until_that_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = asyncio.Event()
    original = DiskFiles.read_again

    async def waits(self: DiskFiles, path: str) -> ReadAgain:
        await gate.wait()
        return await original(self, path)

    monkeypatch.setattr(DiskFiles, "read_again", waits)
    async with watching(tmp_path) as stage:
        with training(stage.root) as trainer:
            (full,) = await sealed(stage, trainer, 1)
            os.utime(stage.root / full.path / "refit.json", ns=(1, 1))
            delta = (await trainer.follow()).version_id
        record = await stage.verdict(delta, VersionState.UNKNOWN)
        assert record.verdict.unended == 0
        assert record.reason == f"the files of {full.id} have changed since they were checked, and are read again"
        gate.set()
        await stage.verdict(delta, VersionState.SEALED)


async def test_a_base_that_cannot_be_read_now_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with watching(tmp_path) as stage:
        with training(stage.root) as trainer:
            await sealed(stage, trainer, 1)
            with monkeypatch.context() as broken:
                broken.setattr(Bases, "read", _failing)
                delta = (await trainer.follow()).version_id
                record = await stage.verdict(delta, VersionState.UNKNOWN)
                assert record.verdict.unended == 0
                assert record.reason == "cannot be read: [Errno 5] I/O error"
            await stage.verdict(delta, VersionState.SEALED)


async def _failing(_: Bases, __: Beneath) -> Base | NoBase:
    raise OSError(errno.EIO, "I/O error")
