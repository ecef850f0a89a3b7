"""AReaL's group calls at the front: what is refused before any process begins, and what AReaL hears when it goes on."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from refitd_front.assembly import sent_part
from refitd_front.sessions import Sessions
from support.front_app import front_of
from support.scripted_server import answer, serve

INIT = {
    "master_address": "127.0.0.1", "master_port": "9", "rank_offset": 1, "world_size": 3, "backend": "gloo",
    "group_name": "update_weight_group",
}  # fmt: skip
BUCKET: dict[str, Any] = {
    "names": ["a"],
    "dtypes": ["bfloat16"],
    "shapes": [[2, 3]],
    "group_name": "update_weight_group",
}


@asynccontextmanager
async def facing(engine: str, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    front, versions, sessions = front_of(engine, tmp_path)
    transport = httpx.ASGITransport(cast("Any", front.app()))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as trainer:
        yield trainer
    assert not sessions._groups  # no call of these tests has begun a process
    await sessions.aclose()
    await front.aclose()
    versions.close()


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/init_weights_update_group", {**INIT, "backend": "hccl"}, "have the trainer update by disk"),
        ("/areal_init_weights_update_group", {**INIT, "world_size": 1}, "it has 1 ranks"),
        ("/init_weights_update_group", {**INIT, "world_size": 10**6}, "between 2 and 129"),
        ("/init_weights_update_group", {**INIT, "rank_offset": 3}, "rank_offset 3"),
        ("/init_weights_update_group", {**INIT, "master_port": "x"}, "cannot be joined"),
        ("/init_weights_update_group", {}, "cannot be joined"),
        ("/update_weights_from_distributed", BUCKET, "no update has begun"),
        ("/update_weights_from_distributed", {**BUCKET, "dtypes": ["complex64"]}, "cannot be taken"),
        ("/areal_set_update_weight_meta", {}, "cannot be taken"),
        ("/areal_update_weights_xccl", {}, "/areal_set_update_weight_meta"),
    ],
)
async def test_a_group_call_that_cannot_be_answered_is_refused_with_what_to_do(
    path: str, body: dict[str, Any], named: str, tmp_path: Path
) -> None:
    async with facing("http://127.0.0.1:9", tmp_path) as areal:
        refused = await areal.post(path, json=body)
    assert (refused.status_code, refused.json()["success"]) == (400, False)
    assert named in refused.json()["message"]


@pytest.mark.parametrize("vllm", [False, True])
async def test_to_go_on_after_a_bucket_was_lost_is_an_error_and_the_engine_generates_on(
    tmp_path: Path, *, vllm: bool
) -> None:
    """Until the next update begins: AReaL makes a call that fails again."""
    way = "/areal_" if vllm else "/"
    with serve(answer(200, {"text": "ok"})) as engine:
        async with facing(engine.url, tmp_path) as areal:
            assert (await areal.post(f"{way}pause_generation", json={})).status_code == 200
            if vllm:
                assert (await areal.post("/areal_set_update_weight_meta", json=BUCKET)).status_code == 200
                assert (await areal.post("/areal_update_weights_xccl", json={})).status_code == 400
            else:
                assert (await areal.post("/update_weights_from_distributed", json=BUCKET)).status_code == 400
            for _ in range(2):
                refused = await areal.post(f"{way}continue_generation", json={})
                assert refused.status_code == 400
                assert "weights of before" in refused.json()["message"]
            assert (await areal.post("/generate", json={"input_ids": [1]})).json() == {"text": "ok"}
            assert (await areal.post(f"{way}pause_generation", json={})).status_code == 200
            assert (await areal.post(f"{way}continue_generation", json={})).status_code == 200


async def test_an_update_that_failed_is_no_success_after_a_restart_either(tmp_path: Path) -> None:
    """Between two tries of AReaL's."""
    key = sent_part("g", BUCKET["names"], BUCKET["dtypes"], BUCKET["shapes"])
    for number in range(3):
        groups = Sessions(cast("Any", None), tmp_path / "spool")
        groups.open()
        if number == 0:
            groups.begin()
            assert "no group" in str(await groups.bucket("engine", key))
        if number < 2:
            assert await groups.finish() is not None
        else:
            groups.begin()
            assert await groups.finish() is None
        await groups.aclose()
    assert not (tmp_path / "spool").exists()
