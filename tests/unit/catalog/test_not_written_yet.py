"""Files that a trainer makes in full size and fills later, without a manifest that says when they are written."""

import mmap
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from refitd.state.version import VersionRecord
from refitd_client.contract.states import VersionState
from refitd_client.contract.wire import Notice
from support import catalogs
from support.catalogs import Stage, watching
from support.checkpoints import Tensors, write_model

V1, FILE = "run~v000001", "model.safetensors"


def weights() -> Tensors:
    """Large enough to have pages."""
    random = np.random.default_rng(1)
    return {f"layer.{i}.weight": random.standard_normal((64, 64)).astype(np.float32) for i in range(4)}


async def whole(stage: Stage, tmp_path: Path) -> tuple[bytes, int, VersionRecord]:
    """The file as it is to be, where its tensors begin, and the version that it is when it is written at once."""
    data = (write_model(stage.root / "other/v000001", weights()) / FILE).read_bytes()
    sealed = await stage.verdict("other~v000001", VersionState.SEALED)
    return data, 8 + int.from_bytes(data[:8], "little"), sealed


def begun(stage: Stage) -> Path:
    folder = stage.root / "run/v000001"
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes((stage.root / "other/v000001/config.json").read_bytes())
    return folder / FILE


RESERVED: dict[str, Callable[[int, int], None]] = {
    "made longer": os.ftruncate,
    "allocated": lambda fd, size: os.posix_fallocate(fd, 0, size),
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_model(tmp_path / "base", weights())


@pytest.mark.parametrize("reserve", RESERVED.values(), ids=RESERVED)
@pytest.mark.parametrize("half", ["first", "second"])
async def test_a_file_with_a_hole_is_still_being_written(
    tmp_path: Path, base: Path, reserve: Callable[[int, int], None], half: str
) -> None:
    async with watching(tmp_path, model=base) as stage:
        data, head, sealed = await whole(stage, tmp_path)
        middle = (head + (len(data) - head) // 2) & -mmap.PAGESIZE
        file = begun(stage)
        with file.open("w+b") as opened:
            fd = opened.fileno()
            os.pwrite(fd, data[:head], 0)
            reserve(fd, len(data))
            begin, end = (head, middle) if half == "first" else (middle, len(data))
            os.pwrite(fd, data[begin:end], begin)
            found = await stage.verdict(V1, VersionState.SETTLING)
            await stage.until(lambda: "has a hole at byte" in (stage.store.versions[V1].reason or ""))
            assert found.digest is None
            os.pwrite(fd, data, 0)
        assert (await stage.verdict(V1, VersionState.SEALED)).digest == sealed.digest


async def test_a_file_whose_hole_stays_is_rejected_by_what_is_missing(tmp_path: Path, base: Path) -> None:
    async with watching(tmp_path, model=base) as stage:
        data, head, _ = await whole(stage, tmp_path)
        with begun(stage).open("w+b") as opened:
            opened.write(data[:head])
            opened.truncate(len(data))
        found = await stage.verdict(V1, VersionState.REJECTED)
        assert f"{FILE} has a hole at byte" in (found.reason or "")
        assert "POST /v1/versions" in (found.reason or "")
        assert len(found.reason or "") <= 240


async def test_what_its_trainer_says_is_written_may_have_holes(tmp_path: Path, base: Path) -> None:
    """A copy leaves out zeros, and some file systems do."""
    async with watching(tmp_path, model=base) as stage:
        data, head, _ = await whole(stage, tmp_path)
        with begun(stage).open("w+b") as opened:
            opened.write(data[:head])
            opened.truncate(len(data))
        await stage.intake.take(Notice(run="run", step=1))
        await stage.verdict(V1, VersionState.SEALED)


async def test_what_the_scan_found_first_is_judged_when_its_trainer_says_that_it_is_written(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scan sees a folder as soon as it is made. Its wait for changes ends with the notice."""
    monkeypatch.setattr(catalogs, "RULES", replace(catalogs.RULES, settle_for=3600.0, settle_timeout=3600.0))
    async with watching(tmp_path, model=base) as stage:
        write_model(stage.root / "run/v000001", weights())
        await stage.verdict(V1, VersionState.SETTLING)
        await stage.intake.take(Notice(run="run", step=1))
        await stage.verdict(V1, VersionState.SEALED)


async def test_what_is_stored_through_a_mapping_into_zeros_is_waited_for(tmp_path: Path, base: Path) -> None:
    """On a tmpfs such a store changes no time, and the pages are there already: only the zeros tell."""
    async with watching(tmp_path, model=base) as stage:
        data, head, sealed = await whole(stage, tmp_path)
        file = begun(stage)
        file.write_bytes(data[:head] + bytes(len(data) - head))
        status = file.stat()
        await stage.until(lambda: "ends in zeros" in _reason(stage))
        with file.open("r+b") as opened:
            opened.seek(head)
            opened.write(data[head:])
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert (await stage.verdict(V1, VersionState.SEALED)).digest == sealed.digest


def _reason(stage: Stage) -> str:
    record = stage.store.versions.get(V1)
    return "" if record is None else record.reason or ""


async def test_weights_that_are_zeros_are_sealed_a_while_later(tmp_path: Path, base: Path) -> None:
    async with watching(tmp_path, model=base) as stage:
        write_model(stage.root / "run/v000001", {name: np.zeros_like(each) for name, each in weights().items()})
        await stage.verdict(V1, VersionState.SEALED)
