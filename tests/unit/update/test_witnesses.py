"""Engines whose checksums of one version differ: none is believed because it was heard first."""

import asyncio
from pathlib import Path

import pytest

from refitd.explain.run import glance_at
from refitd_client.contract.states import EngineState, Standing
from support.checkpoints import publish, tensors
from support.services import Stage, serving
from support.simulated_engine import SimulatedEngine

V1, V2, TRUE, FALSE = "run~v000001", "run~v000002", "xxh3:true ", "xxh3:false "
GOOD = (EngineState.IN_SYNC, V1, True)


async def _loaded(stage: Stage, names: str, *, at_once: bool = False) -> None:
    """Have engines load version 1: one after the other in this order, or all at once."""
    gates = {name: asyncio.Event() for name in names}
    for name, gate in gates.items():
        stage.engines[name].gate = gate
    publish(stage.root, "run", 1, tensors(1))
    await stage.until(V1, lambda _: all(each.loads for each in stage.engines.values()))
    for name, gate in gates.items():
        gate.set()
        if not at_once:
            await stage.until(V1, lambda _, id_=f"{name}:1": V1 in stage.store.engines[id_].contents.given)


def _states(stage: Stage) -> dict[str, tuple[EngineState, str | None, bool]]:
    return {each.id[0]: (each.state, each.serving, each.known) for each in stage.store.engines.values()}


@pytest.mark.parametrize("order", ["abc", "bac", "bca"])
@pytest.mark.parametrize("at_once", [False, True])
async def test_a_liar_is_quarantined_and_the_others_serve_whoever_is_heard_first(
    tmp_path: Path, order: str, at_once: bool
) -> None:
    async with serving(tmp_path, names=tuple("abc")) as stage:
        for name, simulated in stage.engines.items():
            simulated.proof = FALSE if name == "a" else TRUE
        await _loaded(stage, order, at_once=at_once)
        await stage.until(V1, lambda _: _states(stage)["a"][0] is EngineState.QUARANTINED)
        await stage.until(V1, lambda record: record.served_at is not None)
        assert (_states(stage)["b"], _states(stage)["c"]) == (GOOD, GOOD)
        assert all(len(stage.engines[name].loads) <= 2 for name in "bc"), "a good engine was repaired"


async def test_a_lone_word_about_an_older_version_is_no_more_than_that_when_its_engine_has_moved_on(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, names=("a", "b")) as stage:
        stage.engines["a"].proof, stage.engines["b"].proof = FALSE, TRUE
        stage.engines["b"].gate = asyncio.Event()  # it comes to version 1 when the other engine has left it
        publish(stage.root, "run", 1, tensors(1))
        await stage.until(V1, lambda _: V1 in stage.store.engines["a:1"].contents.given)
        publish(stage.root, "run", 2, tensors(2))
        await stage.until(V2, lambda _: V2 in stage.store.engines["a:1"].contents.given)
        stage.engines["b"].gate.set()
        await stage.until(V1, lambda _: V1 in stage.store.engines["b:1"].contents.given)
        assert stage.store.engines["b:1"].trouble.taints == 0
        assert stage.store.engines["b:1"].trouble.strikes == {}


async def test_one_against_one_is_trouble_pauses_nobody_and_is_not_served(tmp_path: Path) -> None:
    async with serving(tmp_path, names=("a", "b")) as stage:
        stage.engines["a"].proof, stage.engines["b"].proof = FALSE, TRUE
        await _loaded(stage, "ab")
        await stage.until(V1, lambda _: all(each.doubted for each in stage.store.engines.values()))
        assert _states(stage) == {"a": GOOD, "b": GOOD}
        found = glance_at(stage.store, stage.targets, "run")
        assert (found.standing, found.in_sync) == (Standing.TROUBLED, 0)
        assert found.trouble is not None
        assert found.trouble.startswith(f"a:1, b:1 hold different contents of {V1}")
        waited = (await stage.http.get(f"/v1/versions/{V1}/wait", params={"timeout": 0})).json()
        assert waited["outcome"] == "pending"
        assert [each["serves"] for each in waited["version"]["engines"]] == [False, False]

        stage.engines["a"].proof = TRUE  # its memory is mended
        assert (await stage.http.post("/v1/engines/a:1/resync")).status_code == 202
        await stage.until(V1, lambda record: record.served_at is not None)
        assert glance_at(stage.store, stage.targets, "run").standing is Standing.CURRENT


async def test_a_third_engine_that_comes_later_decides(tmp_path: Path) -> None:
    async with serving(tmp_path, names=("a", "b"), engine_allow=["c"]) as stage:
        stage.engines["a"].proof, stage.engines["b"].proof = FALSE, TRUE
        await _loaded(stage, "ab")
        await stage.until(V1, lambda _: all(each.doubted for each in stage.store.engines.values()))
        stage.engines["c"] = SimulatedEngine()
        stage.engines["c"].proof = TRUE
        assert (await stage.http.post("/v1/engines", json={"url": "http://c:1"})).status_code == 201
        await stage.until(V1, lambda _: _states(stage)["a"][0] is EngineState.QUARANTINED)
        assert (_states(stage)["b"], _states(stage)["c"]) == (GOOD, GOOD)
        assert stage.store.engines["b:1"].doubted is None


async def test_engines_that_two_liars_had_condemned_are_released_when_more_are_heard(tmp_path: Path) -> None:
    async with serving(tmp_path, names=tuple("abcde")) as stage:
        for name, simulated in stage.engines.items():
            simulated.proof = FALSE if name in "ab" else TRUE
        await _loaded(stage, "abcde")
        await stage.until(V1, lambda _: all(_states(stage)[name][0] is EngineState.QUARANTINED for name in "ab"))
        await stage.until(V1, lambda _: all(_states(stage)[name] == GOOD for name in "cde"))
        await stage.until(V1, lambda record: record.served_at is not None)
