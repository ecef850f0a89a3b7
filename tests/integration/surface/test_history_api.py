"""What has been, by the API and both clients: past updates, and an engine's past."""

import asyncio
from pathlib import Path

from support.checkpoints import publish, tensors
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
