"""The disk budget, from outside: every byte under the root that refitd may delete counts, whatever it belongs to."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refitd.catalog import catalog
from refitd.reclaim import sweep
from refitd_client.contract.states import VersionState
from support.checkpoints import Tensors, publish, tensors
from support.services import Stage, serving


def bad(seed: int) -> Tensors:
    """Tensors that are read to the end before they are rejected."""
    weights = tensors(seed)
    weights["layer.1.weight"][0, 0] = np.nan
    return weights


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def on_disk(stage: Stage) -> list[str]:
    return sorted(path.name for path in (stage.root / "run").glob("v*"))


async def swept(stage: Stage) -> dict[str, Any]:
    answer = await stage.http.post("/v1/reclaim")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def kept_bytes(stage: Stage, what: str) -> float:
    text = (await stage.http.get("/metrics")).text
    named = f'refitd_kept_bytes{{what="{what}"}}'
    (value,) = [line.split()[-1] for line in text.splitlines() if line.startswith(named)]
    return float(value)


async def faults(stage: Stage) -> dict[str, Any]:
    return (await stage.http.get("/v1/overview")).json()["faults"]


async def fault_metric(stage: Stage, part: str) -> float:
    text = (await stage.http.get("/metrics")).text
    (value,) = [line.split()[-1] for line in text.splitlines() if line.startswith(f'refitd_fault{{part="{part}"}}')]
    return float(value)


async def reject(stage: Stage, step: int, weights: Tensors) -> Path:
    folder = publish(stage.root, "run", step, weights)
    await stage.rejected(f"run~v{step:06d}")
    return folder


async def test_seven_bad_checkpoints_do_not_outgrow_the_budget_and_the_oldest_go_first(tmp_path: Path) -> None:
    good = size(publish(tmp_path / "measure", "run", 1, tensors(1)))
    async with serving(tmp_path, disk_budget=4 * good + good // 2) as stage:
        await stage.served(1)
        for step in range(2, 9):
            await reject(stage, step, bad(step))
        planned = (await stage.http.get("/v1/reclaim/plan")).json()
        assert all(item["bytes"] == pytest.approx(good, rel=0.02) for item in planned["items"])
        done = await swept(stage)
        assert on_disk(stage) == ["v000001", "v000006", "v000007", "v000008"]
        assert planned["freed_bytes"] == done["freed_bytes"] > 0
        assert size(stage.root / "run") == done["kept_bytes"] <= done["disk_budget"]
        assert await kept_bytes(stage, "version") == done["kept_bytes"]
        overview = (await stage.http.get("/v1/overview")).json()
        assert overview["held_bytes"] == done["kept_bytes"]
        explained = (await stage.http.get("/v1/explain/run~v000007")).json()["sentences"]
        assert any("Its folder takes" in sentence for sentence in explained)
        deleted = (await stage.http.get("/v1/versions/run~v000002")).json()
        assert deleted["reason"].startswith("evidence: the disk budget of ")
        assert "non-finite" in deleted["reason"], "why it was bad stays known"


async def run_now(stage: Stage) -> dict[str, Any]:
    """The run as the overview has it, once its engine serves the target."""
    async with asyncio.timeout(10):
        while True:
            (run,) = (await stage.http.get("/v1/overview")).json()["runs"]
            if run["in_sync"] == 1:
                return run
            await stage.store.changed.wait_after(stage.store.changed.count, within=0.05)


async def test_a_run_stays_troubled_when_the_evidence_of_its_rejected_version_is_deleted(tmp_path: Path) -> None:
    """Also after a restart, and until a newer version is good."""
    async with serving(tmp_path, disk_budget=1) as stage:
        await stage.served(1)
        await reject(stage, 2, bad(2))
        before = await run_now(stage)
        assert before["standing"] == "TROUBLED"
        await swept(stage)
        assert on_disk(stage) == ["v000001"]
        assert await run_now(stage) == before
    async with serving(tmp_path, disk_budget=1) as stage:
        await stage.listed()
        assert await run_now(stage) == before
        await stage.served(3)
        assert (await run_now(stage))["standing"] == "CURRENT"


async def test_a_rollback_is_also_one_from_a_rejected_version_whose_evidence_was_deleted(tmp_path: Path) -> None:
    good = size(publish(tmp_path / "measure", "run", 1, tensors(1)))
    async with serving(tmp_path, disk_budget=2 * good + good // 4) as stage:
        await stage.served(1)
        await stage.served(2)
        await reject(stage, 3, bad(3))
        await swept(stage)
        assert on_disk(stage) == ["v000001", "v000002"]
        plan = (await stage.http.get("/v1/rollback", params={"run": "run"})).json()
        assert plan["barred"] == ["run~v000003", "run~v000002"]
        assert (await stage.http.post("/v1/rollback", json={"run": "run"})).status_code == 200
        await stage.until("run~v000002", lambda version: version.barred)
        assert (await run_now(stage))["standing"] == "ROLLED_BACK"
        assert (await stage.http.get("/v1/versions/run~v000003")).json()["state"] == "DELETED"
    async with serving(tmp_path, disk_budget=2 * good + good // 4) as stage:
        await stage.listed()
        assert (await run_now(stage))["standing"] == "ROLLED_BACK"
        await reject(stage, 4, bad(4))
        assert (await run_now(stage))["standing"] == "TROUBLED"


async def test_a_version_whose_files_cannot_be_opened_counts_as_well(tmp_path: Path) -> None:
    """A torn manifest, and a shard that is a link: nothing of it was ever read."""
    async with serving(tmp_path, disk_budget=10**9) as stage:
        await stage.served(1)
        folder = publish(stage.root, "run", 2, tensors(2))
        shard = folder / "model-00001-of-00002.safetensors"
        shard.unlink()
        shard.symlink_to("/dev/null")
        await stage.rejected("run~v000002")
        done = await swept(stage)
        (line,) = [item for item in done["items"] if item["version"] == "run~v000002"]
        assert line["bytes"] == sum(path.stat().st_size for path in folder.iterdir() if not path.is_symlink())
        assert (await stage.http.get("/v1/versions/run~v000002")).json()["bytes"] == line["bytes"]


async def test_what_a_publisher_is_writing_takes_of_the_budget(tmp_path: Path) -> None:
    good = size(publish(tmp_path / "measure", "run", 1, tensors(1)))
    async with serving(tmp_path, disk_budget=4 * good) as stage:
        await stage.served(1)
        for step in (2, 3):
            await reject(stage, step, bad(step))
        await swept(stage)
        assert on_disk(stage) == ["v000001", "v000002", "v000003"]
        incoming = stage.root / "run" / ".incoming-4"
        incoming.mkdir()
        (incoming / "model.safetensors").write_bytes(b"x" * (good + good // 2))
        done = await swept(stage)
        assert on_disk(stage) == ["v000001", "v000003"]
        assert await kept_bytes(stage, "incoming") == good + good // 2
        assert done["kept_bytes"] == size(stage.root / "run") <= done["disk_budget"]


async def test_what_stays_over_the_budget_is_a_fault_that_says_what_to_do_until_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = size(publish(tmp_path / "measure", "run", 1, tensors(1)))
    async with serving(tmp_path, disk_budget=2 * good + good // 2, keep_last=1) as stage:
        for step in (1, 2, 3):
            await stage.served(step)
            assert (await stage.http.put(f"/v1/versions/run~v{step:06d}/pin")).status_code == 200
        await swept(stage)
        assert (await faults(stage))["disk"] is None, "a version without a verdict may have been the cause"
        monkeypatch.setattr(sweep, "OVER_BUDGET_FOR", 0.0)  # seconds
        await swept(stage)
        told = (await faults(stage))["disk"]
        assert f"over the disk budget of {2 * good + good // 2:,}: 'refitd reclaim --dry-run'" in told
        assert "unpin versions" in told
        assert (await stage.http.get("/v1/overview")).json()["faults"]["disk"] == told
        assert await fault_metric(stage, "disk") == 1
        await stage.http.delete("/v1/versions/run~v000001/pin")
        await swept(stage)
        assert on_disk(stage) == ["v000002", "v000003"]
        assert (await faults(stage))["disk"] is None
        assert await fault_metric(stage, "disk") == 0


async def test_folders_that_are_not_taken_in_are_a_fault_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "MOST_OPEN", 0)
    async with serving(tmp_path) as stage:
        publish(stage.root, "run", 1, tensors(1))
        async with asyncio.timeout(10):
            while (told := (await faults(stage))["folders"]) is None:
                await stage.store.changed.wait_after(stage.store.changed.count, within=0.02)
        assert told.startswith("1 folder is not taken in yet (1 of run run)")
        assert "'refitd runs close RUN'" in told
        assert await fault_metric(stage, "folders") == 1
        monkeypatch.undo()
        await stage.until("run~v000001", lambda record: record.state is VersionState.SEALED)
        assert (await faults(stage))["folders"] is None
