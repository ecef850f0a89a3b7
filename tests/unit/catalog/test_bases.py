"""What deltas are held against: looked at each time, and parsed once."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from refitd.catalog.examining import Bases
from refitd.catalog.files import DiskFiles
from refitd.policy.chain import NoBase
from refitd.state.version import VersionRecord
from refitd_client.checkpoint.fault import Defect
from refitd_client.validation.base import Base
from refitd_client.validation.validate import Structure
from support.deltas import chain, training


class CountingFiles(DiskFiles):
    """Remembers what it was asked to parse; `fault` is what is wrong with it just now."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, guard=lambda: None)
        self.parsed: list[str] = []
        self.fault: Defect | None = None

    async def structure(self, path: str) -> Structure:
        self.parsed.append(path.rpartition("/")[2])
        seen = await super().structure(path)
        return seen if self.fault is None else replace(seen, faults=(self.fault,))


@pytest.fixture
def records(tmp_path: Path) -> list[VersionRecord]:
    with training(tmp_path) as trainer:
        return chain(trainer, tmp_path, 4)


@pytest.fixture
def files(tmp_path: Path) -> CountingFiles:
    return CountingFiles(tmp_path)


@pytest.fixture
def bases(records: list[VersionRecord], files: CountingFiles) -> Bases:
    store: Any = SimpleNamespace(versions={record.id: record for record in records}, gone=set())
    return Bases(store, files)


async def of(bases: Bases, delta: VersionRecord) -> Base | NoBase:
    """What a delta is held against."""
    beneath = bases.beneath(delta)
    return beneath if isinstance(beneath, NoBase) else await bases.read(beneath)


async def test_what_many_deltas_stand_on_is_parsed_once(
    bases: Bases, files: CountingFiles, records: list[VersionRecord]
) -> None:
    first = await of(bases, records[1])
    assert isinstance(first, Base)
    assert files.parsed == ["v000001"]
    assert await of(bases, records[1]) == first
    found = await of(bases, records[2])
    assert isinstance(found, Base)
    assert found.id == records[1].id
    assert found.inventory == first.inventory
    assert found.fingerprints
    assert found.fingerprints != first.fingerprints
    assert await of(bases, records[2]) == found
    assert files.parsed == ["v000001", "v000002"]


async def test_a_base_that_goes_after_it_was_remembered_cannot_be_read(
    tmp_path: Path, bases: Bases, records: list[VersionRecord]
) -> None:
    assert isinstance(await of(bases, records[2]), Base)
    shutil.rmtree(tmp_path / records[0].path)
    with pytest.raises(FileNotFoundError):
        await of(bases, records[2])


async def test_a_delta_that_was_remembered_is_looked_at_and_not_parsed(
    tmp_path: Path, bases: Bases, files: CountingFiles, records: list[VersionRecord]
) -> None:
    bases.remember(await files.structure(records[1].path))
    files.parsed.clear()
    found = await of(bases, records[2])
    assert isinstance(found, Base)
    assert found.fingerprints
    assert files.parsed == ["v000001"]
    os.utime(tmp_path / records[1].path / "refit.json", ns=(1, 1))
    assert isinstance(await of(bases, records[2]), NoBase)
