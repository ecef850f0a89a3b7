"""What has been, by the API and both clients: past updates, an engine's past, and two versions compared."""

import asyncio
import os
from pathlib import Path
from threading import Event

import httpx
import numpy as np
import pytest

from refitd.catalog import compare
from refitd_client import RefitClient
from refitd_client.contract.states import VersionState
from support.attackers import listening
from support.checkpoints import publish, tensors
from support.deltas import training
from support.services import serving

ONE, TWO = "run~v000001", "run~v000002"


async def test_each_update_says_what_it_took_and_what_failed(tmp_path: Path) -> None:
    async with serving(tmp_path, names=("a", "b")) as stage:
        await stage.served(1)
        publish(stage.root, "run", 2, {"layer.0.weight": tensors(2)["layer.0.weight"]})
        await stage.rejected(TWO)
        found = (await stage.http.get("/v1/history")).json()
        assert found["complete"]
        two, one = found["updates"]
        assert (two["state"], two["loads"], two["pause"]) == ("REJECTED", 0, None)
        assert (one["loads"], one["done"], one["failed"], one["kind"]) == (2, {"full": 2}, {}, "full")
        assert one["pause"]["count"] == one["served"]["count"] == 2
        assert one["served"]["p95"] >= one["pause"]["p95"]
        assert [each["step"] for each in (await stage.http.get("/v1/history?limit=1")).json()["updates"]] == [2]
        unknown = await stage.http.get("/v1/history?run=other")
        assert (unknown.status_code, unknown.json()["type"]) == (404, "urn:refitd:problem:unknown-run")
        assert "'refitd runs' lists" in unknown.json()["detail"]
        assert (await stage.http.get("/v1/history?limit=1001")).status_code == 422


async def test_an_engines_past_has_its_loads_and_the_time_for_which_it_was_away(tmp_path: Path) -> None:
    async with serving(tmp_path, names=("a", "b")) as stage:
        await stage.served(1)
        stage.engines["b"].down = True
        async with asyncio.timeout(10):
            while stage.store.engines["b:1"].state != "UNREACHABLE":
                await stage.store.changed.wait_after(stage.store.changed.count, within=0.05)
        await stage.served(2)
        past = (await stage.http.get("/v1/history/engines/b:1")).json()
        assert [(load["step"], load["outcome"], load["kind"]) for load in past["loads"]] == [(1, "ACK", "full")]
        assert [(outage["state"], outage["until"]) for outage in past["outages"]] == [("UNREACHABLE", None)]
        by_url = (await stage.http.get("/v1/history/engines/http://a:1?limit=1")).json()
        assert (by_url["engine"], [load["step"] for load in by_url["loads"]], by_url["more"]) == ("a:1", [2], True)
        unknown = await stage.http.get("/v1/history/engines/nowhere")
        assert (unknown.status_code, unknown.json()["type"]) == (404, "urn:refitd:problem:unknown-engine")


async def test_two_full_versions_are_compared_by_their_headers_and_their_values(tmp_path: Path) -> None:
    weights = tensors(1)
    moved = {name: tensor.copy() for name, tensor in weights.items()}
    moved["layer.2.weight"] += 1.0
    async with serving(tmp_path, keep_last=5) as stage, listening(stage.api, within=100) as server:
        publish(stage.root, "run", 1, weights)
        publish(stage.root, "run", 2, moved)
        await stage.until(TWO, lambda record: record.state is VersionState.SEALED)
        with RefitClient(f"http://127.0.0.1:{server.port}") as client:
            found = await asyncio.to_thread(client.compare, ONE, TWO)
            assert (found.tensors, found.added, found.removed, found.reshaped) == ((4, 4), [], [], [])
            assert (found.norm, found.changed_tensors, found.density) == (None, None, None)
            assert "fingerprints" in found.notes[0]
            read = await asyncio.to_thread(client.compare, ONE, TWO, norms=True)
            assert len((await asyncio.to_thread(client.history)).updates) == 2
            assert (await asyncio.to_thread(client.engine_history, "a:1")).loads
    distances = {layer.layer: layer.distance for layer in read.layers}
    assert distances == pytest.approx({"layer.0": 0, "layer.1": 0, "layer.2": 12**0.5, "layer.3": 0}, rel=1e-5)
    assert read.layers[2].norm == pytest.approx(float(np.linalg.norm(weights["layer.2.weight"])), rel=1e-5)
    assert read.distance == pytest.approx(12**0.5, rel=1e-5)
    assert [(layer.changed, layer.changed_tensors) for layer in read.layers] == [(0, 0), (0, 0), (12, 1), (0, 0)]
    assert (read.density, read.changed_tensors, read.notes) == (12 / 48, 1, [])


async def test_a_delta_says_how_many_elements_of_each_layer_changed(tmp_path: Path) -> None:
    async with serving(tmp_path, keep_last=5) as stage:
        with training(stage.root) as trainer:
            trainer.asks(stage.store, stage.targets)
            for _ in (1, 2):
                published = await trainer.follow()
                await stage.until(published.version_id, lambda record: record.served_at is not None)
        found = (await stage.http.get(f"/v1/versions/{ONE}/compare/{TWO}")).json()
        back = (await stage.http.get(f"/v1/versions/{TWO}/compare/{ONE}")).json()
        changed = {layer["layer"]: layer["changed"] for layer in found["layers"]}
        differs = {layer["layer"]: layer["changed_tensors"] for layer in found["layers"]}
        assert changed == {"layer.0": 2, "layer.1": 2, "layer.2": 0, "layer.3": 0}
        assert differs == {"layer.0": 1, "layer.1": 1, "layer.2": 0, "layer.3": 0}
        assert (found["density"], back["density"]) == (4 / 48, 4 / 48)
        refused = await stage.http.get(f"/v1/versions/{ONE}/compare/{TWO}?norms=true")
        assert (refused.status_code, refused.json()["type"]) == (409, "urn:refitd:problem:not-comparable")
        assert f"{TWO} is a delta" in refused.json()["detail"]
        updates = (await stage.http.get("/v1/history")).json()["updates"]
        assert [(each["kind"], each["density"]) for each in updates] == [("delta", 4 / 48), ("full", None)]
        assert [each["why_full"] is None for each in updates] == [True, False]
        assert updates[0]["done"] == {"full": 1}, "the engine takes no deltas, and loads a copy"


async def test_what_cannot_be_compared_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, keep_last=2) as stage:
        for step in (1, 2, 3):
            await stage.served(step)

        async def detail(path: str) -> tuple[int, str]:
            answer = await stage.http.get(path)
            return answer.status_code, answer.json()["detail"]

        monkeypatch.setattr(compare, "MOST_BYTES", 100)
        status, text = await detail("/v1/versions/run~v000002/compare/run~v000003?norms=true")
        assert status == 409
        assert "at most 100 of a version are read: compare without norms" in text
        assert (await detail(f"/v1/versions/{ONE}/compare/run~v000009"))[0] == 404
        await stage.sweep()
        gone = next(iter(stage.store.gone))
        assert "were deleted: pin versions" in (await detail(f"/v1/versions/{gone}/compare/run~v000003"))[1]
        (stage.root / "run" / "v000002" / "model-00001-of-00002.safetensors").unlink()
        assert "is not complete" in (await detail("/v1/versions/run~v000002/compare/run~v000003"))[1]


async def test_files_that_change_while_they_are_compared_are_no_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, keep_last=5) as stage:
        for step in (1, 2):
            await stage.served(step)
        shard = stage.root / "run" / "v000002" / "model-00001-of-00002.safetensors"
        read = compare.fill

        def fill(fd: int, data: memoryview, offset: int) -> None:
            read(fd, data, offset)
            os.utime(shard)  # as a publisher that writes into a slot

        monkeypatch.setattr(compare, "fill", fill)
        answer = await stage.http.get(f"/v1/versions/{ONE}/compare/{TWO}?norms=true")
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:refitd:problem:not-comparable")
    assert "compare again" in answer.json()["detail"]


async def test_values_are_read_no_further_when_their_client_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = Event(), Event()

    def slow(*args: object) -> dict[str, tuple[float, float]]:
        stop = args[-1]
        assert isinstance(stop, Event)
        begun.set()
        assert stop.wait(20)
        ended.set()
        return {}

    monkeypatch.setattr("refitd.api.compare.read_values", slow)
    async with serving(tmp_path, keep_last=5) as stage, listening(stage.api, within=100) as server:
        for step in (1, 2):
            await stage.served(step)
        url = f"http://127.0.0.1:{server.port}/v1/versions/{ONE}/compare/{TWO}?norms=true"
        async with httpx.AsyncClient(timeout=20) as client:
            reading = asyncio.create_task(client.get(url))
            assert await asyncio.to_thread(begun.wait, 20)
            second = await stage.http.get(f"/v1/versions/{ONE}/compare/{TWO}?norms=true")
            assert (second.status_code, second.json()["type"]) == (503, "urn:refitd:problem:too-many")
            reading.cancel()
            await asyncio.wait({reading})
        assert await asyncio.to_thread(ended.wait, 20)
