"""Attacks with what is no version: a folder that only has a version's name, or that a notice names, and what somebody
puts into a version's folder. refitd deletes the files that are proved to be a version's, and nothing else.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refitd_client.contract.naming import MANIFEST_NAME
from refitd_client.contract.states import VersionState
from support.checkpoints import Tensors, publish, tensors, write_model
from support.services import Stage, serving

DATA_SET = "datasets/imagenet/v000001"


def bad() -> Tensors:
    """Tensors that no engine gets."""
    weights = tensors(1)
    weights["layer.1.weight"][0, 0] = np.nan
    return weights


def tree(folder: Path) -> dict[str, bytes]:
    """Every file in a folder, by its path there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def evidence_is_old(stage: Stage) -> None:
    """A day goes by for everything that was rejected."""
    sweeper: Any = stage.sweep.__self__  # type: ignore[attr-defined]
    sweeper._rules = replace(sweeper._rules, rejected_for=0.0)


async def told(stage: Stage, path: str) -> dict[str, Any]:
    """What a sweep says of a folder."""
    plan = (await stage.http.post("/v1/reclaim")).json()
    (found,) = [item for item in plan["items"] if item["path"] == path]
    return found


def write(path: Path, data: bytes = b"years of work") -> None:
    """A file of somebody's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


@pytest.mark.parametrize("budget", [None, 1000], ids=["after a day", "over a budget"])
async def test_a_data_set_in_a_folder_that_is_called_like_a_version_is_never_deleted(
    tmp_path: Path, budget: int | None
) -> None:
    async with serving(tmp_path, settle=0.0, disk_budget=budget) as stage:
        write(stage.root / DATA_SET / "raw" / "train.parquet", b"x" * 5000)
        write(stage.root / DATA_SET / "pytorch_model.bin")
        before = tree(stage.root / DATA_SET)
        await stage.rejected("datasets~imagenet~v000001")
        publish(stage.root, "datasets/imagenet", 2, bad())  # newer evidence: the older goes first
        await stage.rejected("datasets~imagenet~v000002")
        if budget is None:
            evidence_is_old(stage)
        found = await told(stage, DATA_SET)
        assert tree(stage.root / DATA_SET) == before
        assert found["keep"]
        assert "refitd may not delete it" in found["reasons"][0]
        assert found["bytes"] == found["foreign_bytes"] == sum(map(len, before.values()))
        assert stage.store.versions["datasets~imagenet~v000001"].state is VersionState.REJECTED


async def test_a_notice_that_names_a_tree_of_somebody_s_has_nothing_of_it_deleted(tmp_path: Path) -> None:
    async with serving(tmp_path, settle=0.0, reclaim_foreign=True) as stage:
        for name in ("thesis.tex", "data/a.bin", ".git/HEAD", "model.bin", "notes.json"):
            write(stage.root / "precious" / name)
        notice = {"run": "run", "step": 1, "path": "precious"}
        assert (await stage.http.post("/v1/versions", json=notice)).status_code in {200, 202}
        # After the notice: a scan that finds this folder first makes the notice, of a folder above it, a conflict.
        write(stage.root / "precious/data/v000003/b.bin")
        before = tree(stage.root / "precious")
        await stage.rejected("run~v000001")
        evidence_is_old(stage)
        found = await told(stage, "precious")
        assert tree(stage.root / "precious") == before
        assert "refitd may not delete it" in found["reasons"][0]


def a_link(folder: Path) -> None:
    (folder / "link").symlink_to(folder.parent)


def a_link_as_a_companion(folder: Path) -> None:
    (folder / "config.json").unlink(missing_ok=True)
    (folder / "config.json").symlink_to("/etc/passwd")


def a_folder_as_a_companion(folder: Path) -> None:
    (folder / "tokenizer.json").mkdir()
    write(folder / "tokenizer.json" / "thesis")


def a_pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe")


PLANTED = {
    "a file": lambda folder: write(folder / "thesis.tex"),
    "a file that looks like a version's": lambda folder: write(folder / "results.json"),
    "a pickle": lambda folder: write(folder / "optimizer.pt"),
    "a hidden file": lambda folder: write(folder / ".env"),
    "no safetensors file": lambda folder: write(folder / "thesis.safetensors"),
    "a folder": lambda folder: write(folder / "raw" / "deep" / "train.parquet"),
    "an empty folder": lambda folder: (folder / "empty").mkdir(),
    "a link": a_link,
    "a link as a companion": a_link_as_a_companion,
    "a folder as a companion": a_folder_as_a_companion,
    "a pipe": a_pipe,
}


@pytest.mark.parametrize("is_good", [True, False], ids=["good", "rejected"])
@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED.keys())
async def test_what_lies_beside_a_versions_files_stays_when_they_go(
    tmp_path: Path, plant: Callable[[Path], None], is_good: bool
) -> None:
    async with serving(tmp_path, settle=0.0, keep_last=1) as stage:
        folder = publish(stage.root, "run", 1, tensors(1) if is_good else bad())
        ours = set(os.listdir(folder))
        done = VersionState.SEALED if is_good else VersionState.REJECTED
        await stage.until("run~v000001", lambda record: record.state is done)
        plant(folder)
        theirs = set(os.listdir(folder)) - ours
        evidence_is_old(stage)
        await stage.served(2)
        await stage.http.post("/v1/reclaim")
        assert "run~v000001" in stage.store.gone
        assert set(os.listdir(folder)) == theirs
        found = await told(stage, "run/v000001")
        assert found["keep"]
        assert found["bytes"] == found["foreign_bytes"]
        assert "refitd may not delete it" in found["reasons"][0]


async def test_a_trainers_own_folder_goes_with_its_weights_and_never_with_anything_else(tmp_path: Path) -> None:
    async with serving(tmp_path, settle=0.0, reclaim_foreign=True, keep_last=1) as stage:
        for step in (1, 2, 3):
            folder = write_model(stage.root / "run" / f"checkpoint-{step}", tensors(step))
            write(folder / "trainer_state.json")
            if step == 2:
                write(folder / "optimizer.pt")
            notice = {"run": "run", "step": step, "path": f"run/checkpoint-{step}"}
            assert (await stage.http.post("/v1/versions", json=notice)).status_code in {200, 202}
            await stage.until(f"run~v00000{step}", lambda record: record.served_at is not None)
        await stage.http.post("/v1/reclaim")
        assert not (stage.root / "run" / "checkpoint-1").exists()
        assert os.listdir(stage.root / "run" / "checkpoint-2") == ["optimizer.pt"]
        assert {"model.safetensors", "config.json"} <= set(os.listdir(stage.root / "run" / "checkpoint-3"))


async def test_a_manifest_that_names_a_file_elsewhere_has_nothing_deleted_by_it(tmp_path: Path) -> None:
    async with serving(tmp_path, settle=0.0) as stage:
        write(stage.root / "run" / "thesis.tex")
        folder = publish(stage.root, "run", 1, bad())
        manifest = (folder / MANIFEST_NAME).read_text()
        (folder / MANIFEST_NAME).write_text(manifest.replace("model-00001-of", "../thesis.tex-00001-of"))
        (folder / "model-00001-of-00002.safetensors").write_bytes(b"torn")
        (folder / "model-00002-of-00002.safetensors").write_bytes(b"torn")
        await stage.rejected("run~v000001")
        evidence_is_old(stage)
        found = await told(stage, "run/v000001")
        assert "refitd may not delete it" in found["reasons"][0]
        assert (stage.root / "run" / "thesis.tex").read_bytes() == b"years of work"


async def test_a_hole_of_terabytes_in_a_rejected_file_makes_no_good_version_go(tmp_path: Path) -> None:
    """A budget counts the blocks that a file takes: a sparse file takes none."""
    async with serving(tmp_path, disk_budget=100_000, keep_last=3) as stage:
        for step in (1, 2):
            await stage.served(step)
        folder = publish(stage.root, "run", 3, bad())
        os.truncate(folder / "model-00001-of-00002.safetensors", 2**42)
        await stage.rejected("run~v000003")
        plan = (await stage.http.post("/v1/reclaim")).json()
        assert all(item["keep"] for item in plan["items"])
        assert plan["kept_bytes"] < 100_000
