"""A run is deleted with all that is known of it, unless somebody needs it; what comes later is no ghost of it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from refitd_client import WeightPublisher
from refitd_client.contract.naming import Order, version_id
from refitd_client.contract.states import VersionState
from refitd_client.contract.wire import VersionPage
from refitd_client.http import publisher_client
from refitd_client.publish.run_folder import decide
from support.checkpoints import publish, tensors
from support.services import Stage, serving

OLD = "exp/old"


async def sealed(stage: Stage, run: str, step: int) -> str:
    publish(stage.root, run, step, tensors(step))
    id_ = version_id(run, Order(1, step))
    await stage.until(id_, lambda record: record.state is VersionState.SEALED)
    return id_


async def deleted(stage: Stage, run: str, status: int = 200) -> Any:
    answer = await stage.http.delete(f"/v1/runs/{run}")
    assert answer.status_code == status, answer.text
    return answer.json() if status == 200 else answer.json()["detail"]


async def runs(stage: Stage) -> list[str]:
    return [run["run"] for run in (await stage.http.get("/v1/overview")).json()["runs"]]


async def test_a_deleted_run_is_gone_at_once_and_its_files_with_the_next_sweep(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await stage.served(1)
        for step in (3, 4):
            await sealed(stage, OLD, step)
        assert await deleted(stage, OLD) == {"run": OLD, "versions": 2}
        assert await runs(stage) == ["run"]
        await stage.http.post("/v1/reclaim")
        assert sorted(stage.root.glob(f"{OLD}/v*")) == []
        assert (await stage.http.get("/v1/versions/exp~old~v000004")).json()["state"] == "DELETED"
        assert "is known" in await deleted(stage, OLD, 404)
        assert sorted(path.name for path in (stage.root / "run").glob("v*")) == ["v000001"]


async def test_who_needs_a_run_is_asked_first(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        id_ = await stage.served(1)
        assert "a:1 follows run run" in await deleted(stage, "run", 409)
        old = await sealed(stage, OLD, 3)
        await stage.http.put(f"/v1/versions/{old}/pin")
        assert f"pinned: {old}" in await deleted(stage, OLD, 409)
        await stage.http.delete(f"/v1/versions/{old}/pin")
        with WeightPublisher(stage.root, OLD):
            assert "a publisher holds run exp/old" in await deleted(stage, OLD, 409)
        await deleted(stage, OLD)
        assert (await stage.http.get(f"/v1/versions/{id_}")).json()["state"] == "SEALED"


async def test_a_run_of_the_same_name_begins_a_new_generation_whoever_publishes(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await stage.served(1)
        await sealed(stage, OLD, 3)
        await deleted(stage, OLD)
        await stage.http.post("/v1/reclaim")
        page = (await stage.http.get("/v1/versions", params={"run": OLD})).json()
        assert page["begins"] == 2
        answer = await stage.http.post("/v1/versions", json={"run": OLD, "step": 1, "path": f"{OLD}/v000001"})
        assert answer.status_code == 409
        publish(stage.root, OLD, 9, tensors(9), page["begins"])
        await stage.until("exp~old~v000009.g2", lambda record: record.state is VersionState.SEALED)
        assert await runs(stage) == [OLD, "run"]
        page = (await stage.http.get("/v1/versions", params={"run": OLD})).json()
        assert page["begins"] is None
        assert [each["id"] for each in page["items"] if each["state"] == "SEALED"] == ["exp~old~v000009.g2"]


async def test_a_folder_of_the_deleted_run_that_turns_up_later_is_no_version(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await stage.served(1)
        await sealed(stage, OLD, 3)
        await deleted(stage, OLD)
        await stage.http.post("/v1/reclaim")
        publish(tmp_path / "elsewhere", OLD, 2, tensors(2)).rename(stage.root / OLD / "v000002")
        await stage.served(2)  # another scan has been
        assert "exp~old~v000002" not in stage.store.versions
        assert (stage.root / OLD / "v000002" / "refit.json").exists()


@pytest.mark.parametrize("step", [1, 3, 9])
async def test_a_publisher_of_the_sdk_asks_and_begins_a_new_generation(tmp_path: Path, step: int) -> None:
    async with serving(tmp_path) as stage:
        await stage.served(1)
        await sealed(stage, OLD, 3)
        await deleted(stage, OLD)
        page = (await stage.http.get("/v1/versions", params={"run": OLD, "limit": 1})).json()

    class Client:
        def __enter__(self) -> "Client":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def versions(self, run: str, limit: int) -> VersionPage:
            return VersionPage(items=[], begins=page["begins"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publisher_client, "open_client", lambda *_, **__: Client())
        known = await asyncio.to_thread(publisher_client.newest_known, object(), OLD)  # type: ignore[arg-type]
    assert decide(step, found=known, own=None) == Order(2, step)
