"""A server that keeps prefixes beyond its GPU has them cleared in each update, or is not updated."""

from contextlib import aclosing
from typing import Any

import pytest

from refitd.engine.port import Outcome, Reached, Refit, Target
from refitd.engine.transaction import ServerEngine
from support.engines import sglang_engine
from support.scripted_server import Step, answer, hang_up, page
from support.scripted_sglang import CLEARED, ScriptedSglang, scripted_sglang

PAUSE, LOAD, RESUME = "/pause_generation", "/update_weights_from_disk", "/continue_generation"
CLEAR, CLEAR_BEFORE_0_5_21 = "/hicache/storage-backend/clear", "/clear_hicache_storage_backend"
HICACHE = {"enable_hierarchical_cache": True, "hicache_storage_backend": "file"}
NOT_CLEARED = answer(400, CLEARED)  # what SGLang answers where it has nothing that it could clear


def speaking_to(sglang: ScriptedSglang) -> aclosing[ServerEngine]:
    return aclosing(sglang_engine(sglang.url))


async def refit(engine: ServerEngine) -> Refit:
    return await engine.refit(Target(path="/root/v7", label="7"), lambda _: None)


def stored(**flags: Any) -> Any:
    return scripted_sglang(told=flags)


@pytest.mark.parametrize("flags", [HICACHE, {"enable_hierarchical_cache": True}, {"enable_lmcache": True}])
async def test_prefixes_beyond_the_gpu_are_cleared_before_the_pause_and_after_the_load(flags: dict[str, Any]) -> None:
    """Again after the load: until the pause the server has gone on storing what the old weights computed."""
    with stored(**flags) as sglang:
        async with speaking_to(sglang) as engine:
            done = await refit(engine)
    assert (done.outcome, done.resumed) == (Outcome.ACK, True)
    assert sglang.changes == [CLEAR, PAUSE, LOAD, CLEAR, RESUME]


async def test_a_server_that_keeps_nothing_beyond_its_gpu_gets_no_call_for_it() -> None:
    with stored(enable_hierarchical_cache=False, enable_lmcache=False, hicache_storage_backend=None) as sglang:
        async with speaking_to(sglang) as engine:
            await refit(engine)
    assert CLEAR not in sglang.changes


async def test_an_older_server_is_asked_by_the_route_that_it_has() -> None:
    with stored(**HICACHE) as sglang:
        sglang.on(CLEAR, answer(404), answer(404))
        sglang.on(CLEAR_BEFORE_0_5_21, answer(200, CLEARED), answer(200, CLEARED))
        async with speaking_to(sglang) as engine:
            done = await refit(engine)
    assert done.outcome is Outcome.ACK
    assert sglang.changes == [CLEAR, CLEAR_BEFORE_0_5_21, PAUSE, LOAD, CLEAR, CLEAR_BEFORE_0_5_21, RESUME]


@pytest.mark.parametrize("reply", [NOT_CLEARED, answer(401), page(200)])
async def test_prefixes_that_cannot_be_cleared_before_the_pause_leave_the_engine_as_it_was(reply: Step) -> None:
    with stored(**HICACHE) as sglang:
        sglang.on(CLEAR, reply)
        async with speaking_to(sglang) as engine:
            done = await refit(engine)
    assert (done.outcome, done.resumed) == (Outcome.NACK, True)
    assert "not cleared" in (done.reason or "")
    assert LOAD not in sglang.changes


@pytest.mark.parametrize("reply", [NOT_CLEARED, answer(500), page(200), hang_up])
async def test_an_engine_that_may_still_hold_prefixes_of_the_old_weights_is_not_resumed(reply: Step) -> None:
    with stored(**HICACHE) as sglang:
        sglang.on(CLEAR, answer(200, CLEARED), reply)
        async with speaking_to(sglang) as engine:
            done = await refit(engine)
            assert (done.outcome, done.resumed) == (Outcome.TAINTED, False)
            assert RESUME not in sglang.changes
            assert (await refit(engine)).outcome is Outcome.ACK


@pytest.mark.parametrize(
    "flags",
    [
        *(HICACHE | {"hicache_storage_backend": backend} for backend in ("aibrix", "eic", "simm")),
        {"enable_unified_cache_external_linker": True},
        {"radix_cache_backend": "flexkv"},
        {"disaggregation_decode_enable_offload_kvcache": True, "hicache_storage_backend": "file"},
        HICACHE | {"hicache_storage_backend": ["of another form"]},
    ],
)
async def test_a_store_that_sglang_does_not_clear_is_refused_by_name_before_anything_is_sent(
    flags: dict[str, Any],
) -> None:
    with stored(**flags) as sglang:
        async with speaking_to(sglang) as engine:
            told = [each for each in await obstacles(engine) if each.blocks]
            done = await refit(engine)
    assert [each.text in (done.reason or "") for each in told] == [True]
    assert (done.outcome, done.resumed, sglang.changes) == (Outcome.NACK, True, [RESUME])


async def test_a_store_that_several_engines_may_share_is_told() -> None:
    with stored(**HICACHE) as sglang:
        async with speaking_to(sglang) as engine:
            (told,) = await obstacles(engine)
    assert (told.blocks, "a store of its own" in told.fix) == (False, True)


async def obstacles(engine: ServerEngine) -> Any:
    seen = await engine.probe()
    assert isinstance(seen, Reached)
    return seen.obstacles
