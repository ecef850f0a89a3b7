"""What routers, probes and trainers hear: whether requests may go to an engine, and which engines serve a step."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from refitd.engine.port import Outcome, Refit
from refitd_client.contract.states import EngineState
from support.checkpoints import publish, tensors
from support.services import Stage, serving


async def gate(stage: Stage, engine: str = "a:1", **params: Any) -> httpx.Response:
    return await stage.http.get("/v1/gate", params={"engine": engine, **params})


async def until(stage: Stage, engine: str, state: EngineState) -> None:
    seen = stage.store.changed.count
    async with asyncio.timeout(10):
        while stage.store.engines[engine].state is not state:
            seen = await stage.store.changed.wait_after(seen, within=1.0)


async def who(stage: Stage, **params: str) -> list[str]:
    answer = await stage.http.get("/v1/engines", params=params)
    assert answer.status_code == 200, answer.text
    return [engine["id"] for engine in answer.json()["items"]]


async def test_the_gate_opens_with_the_first_version_and_says_why_it_is_shut(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        before = await gate(stage)
        assert (before.status_code, before.json()["open"]) == (503, False)
        assert before.json()["reason"].startswith("a:1 ")
        await stage.served(1)
        after = await gate(stage, run="run", max_behind=0)
        assert after.status_code == 200
        told = {"id": "a:1", "open": True, "reason": None, "version": "run~v000001", "step": 1, "behind": 0}
        assert after.json() == told
        assert after.headers["cache-control"] == "no-store"
        other = await gate(stage, run="other")
        assert (other.status_code, other.json()["reason"]) == (503, "a:1 follows run, not other")


async def test_an_engine_with_unknown_contents_is_shut_and_no_error_of_the_api(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await stage.served(1)
        errors = [line for line in (await stage.http.get("/metrics")).text.splitlines() if "refitd_errors" in line]
        stage.engines["a"].script = [Refit(outcome=Outcome.TAINTED, resumed=False, reason="torn")] * 9
        publish(stage.root, "run", 2, tensors(2))
        await until(stage, "a:1", EngineState.TAINTED)
        shut = await gate(stage, max_behind=9)
        assert (shut.status_code, "unknown contents" in shut.json()["reason"]) == (503, True)
        unknown = await gate(stage, "b:1")
        assert (unknown.status_code, unknown.json()["reason"]) == (503, "there is no engine b:1")
        now = [line for line in (await stage.http.get("/metrics")).text.splitlines() if "refitd_errors" in line]
        assert [line for line in now if 'part="api"' in line] == [line for line in errors if 'part="api"' in line]


async def test_the_engine_can_be_named_by_the_host_that_is_called(tmp_path: Path) -> None:
    """As by Envoy, which asks one path and has a host name for each endpoint."""
    async with serving(tmp_path, engines=["http://127.0.0.1:1"]) as stage:
        (id_,) = stage.store.engines
        named = await stage.http.get("/v1/gate", headers={"Host": id_})
        assert (named.status_code, named.json()["id"]) == (503, id_)
        other = await stage.http.get("/v1/gate", headers={"Host": "127.0.0.1:8700"})
        assert other.json()["reason"] == "there is no engine 127.0.0.1:8700"


async def test_engines_are_listed_by_run_and_by_the_step_that_they_serve(tmp_path: Path) -> None:
    async with serving(tmp_path, names=("a", "b")) as stage:
        assert await who(stage, serves=">=0") == []
        await stage.served(1)
        await stage.served(2)
        assert await who(stage, serves="2") == await who(stage, serves=">=1") == await who(stage) == ["a:1", "b:1"]
        assert await who(stage, serves="1") == await who(stage, serves=">=3") == await who(stage, run="other") == []
        assert await who(stage, run="run", serves=">=2") == ["a:1", "b:1"]


@pytest.mark.parametrize("serves", ["", ">2", "=2", ">=", "two", "9" * 14])
async def test_a_step_that_is_none_is_refused(tmp_path: Path, serves: str) -> None:
    async with serving(tmp_path) as stage:
        assert (await stage.http.get("/v1/engines", params={"serves": serves})).status_code == 422
