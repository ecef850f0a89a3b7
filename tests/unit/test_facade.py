"""A facade of an engine: what it does with keys, and what it refuses."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from refitd.areal.facade import OFFLOADS, WRITES, Facade
from refitd.areal.updates import Updates
from support.scripted_server import Server, answer, serve


@pytest.fixture
def engine() -> Iterator[Server]:
    with serve(answer(401), answer(200, {"text": "ok"})) as server:
        yield server


@asynccontextmanager
async def facing(engine: str, tmp_path: Path, key: Path | None = None) -> AsyncIterator[httpx.AsyncClient]:
    updates = Updates(tmp_path, "exp/trial", "http://127.0.0.1:9", timeout=1.0, token_file=None)
    facade = Facade(engine, updates, api_key=key, admin_key=None)
    transport = httpx.ASGITransport(cast("Any", facade.app()))
    async with httpx.AsyncClient(transport=transport, base_url="http://facade") as areal:
        yield areal
    await facade.aclose()
    updates.close()


async def test_a_key_that_was_exchanged_opens_the_engine_without_a_restart(engine: Server, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("old")
    async with facing(engine.url, tmp_path, key) as areal:
        assert (await areal.get("/model_info")).status_code == 401
        key.write_text("new")
        engine.steps.insert(0, answer(401))
        generated = await areal.post("/generate", json={"input_ids": [1]})
    assert (generated.status_code, generated.json()) == (200, {"text": "ok"})
    assert [seen.headers["authorization"] for seen in engine.seen] == ["Bearer old", "Bearer old", "Bearer new"]
    assert engine.seen[1].body == engine.seen[2].body


@pytest.mark.parametrize(("path", "named"), [(WRITES[0], "weight_update_mode"), (OFFLOADS[0], "scheduling_strategy")])
async def test_what_would_change_the_engine_is_refused_with_the_setting_that_calls_it(
    path: str, named: str, tmp_path: Path
) -> None:
    async with facing("http://127.0.0.1:9", tmp_path) as areal:
        refused = await areal.post(path, json={})
    assert refused.status_code == 409
    assert named in refused.json()["message"]


async def test_a_bad_url_of_the_service_is_an_error_for_areal_and_no_traceback(tmp_path: Path) -> None:
    updates = Updates(tmp_path, "exp/trial", "nonsense", timeout=1.0, token_file=None)
    facade = Facade("http://127.0.0.1:9", updates, api_key=None, admin_key=None)
    transport = httpx.ASGITransport(cast("Any", facade.app()))
    async with httpx.AsyncClient(transport=transport, base_url="http://facade") as areal:
        reply = await areal.post("/update_weights_from_disk", json={"model_path": str(tmp_path)})
    await facade.aclose()
    assert reply.status_code == 400
    assert "nonsense" in reply.json()["message"]
    with pytest.raises(ValueError, match="nonsense"):
        updates.open()
