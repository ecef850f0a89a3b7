"""Adapters on vLLM: which calls are sent, what proves a load, and what is left behind when a server misbehaves."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from refitd.engine.port import Outcome, Reached, Refit, Target, Unreached
from refitd.engine.vllm import VllmAdapters
from refitd.policy.observe import after_probe, after_refit
from support.engines import vllm_adapters
from support.records import engine as record
from support.scripted_server import Step, answer, hang_up, page
from support.scripted_vllm import SHAPE, ScriptedVllm, config, error, scripted_vllm

LOAD, UNLOAD, ANSWER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/completions"
RESET = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
TARGET = Target(path="/root/v7", label="7")
CHANGES = {("POST", LOAD), ("POST", UNLOAD)}
NO_NUMBER = error(400, "Out of range float values are not JSON compliant")


def lora(**changes: Any) -> dict[str, Any]:
    """How a server with adapters was started. `changes` are of `parallel_config`."""
    told = config(**changes)
    told["vllm_config"]["lora_config"] = {"max_lora_rank": 8, "max_loras": 1, "max_cpu_loras": 4}
    return told


def speaking_to(vllm: ScriptedVllm, **options: Any) -> aclosing[VllmAdapters]:
    return aclosing(vllm_adapters(vllm.url, name="actor", **options))


async def refit(engine: VllmAdapters, target: Target = TARGET) -> Refit:
    done = await engine.refit(target, lambda _: None)
    if engine._unloading is not None:  # pyright: ignore[reportPrivateUsage]
        await engine._unloading  # pyright: ignore[reportPrivateUsage]
    return done


async def probed(engine: VllmAdapters) -> Reached:
    seen = await engine.probe()
    assert isinstance(seen, Reached), seen
    return seen


async def test_an_adapter_is_loaded_under_its_own_name_and_proved_by_an_answer_without_a_pause() -> None:
    with scripted_vllm(told=lora()) as vllm:
        async with speaking_to(vllm) as engine:
            start = await probed(engine)
            done = await refit(engine)
            seen = await probed(engine)
            fingerprint = await engine.fingerprint(done.fingerprint)
    assert (start.model_path, start.weight_version, start.server) == ("/base", None, "vLLM")
    assert (done.outcome, done.resumed, done.reason) == (Outcome.ACK, True, None)
    assert vllm.changes == [LOAD]
    assert vllm.adapters == {"actor-v7": "/root/v7"}
    assert (done.fingerprint or "").startswith("vllm-answers:-:")
    assert fingerprint == done.fingerprint
    assert (seen.model_path, seen.weight_version, seen.startup_path) == ("/root/v7", "7", "/base")
    assert seen.configuration.endswith(" lora actor")


async def test_the_routes_for_adapters_get_the_key_that_vllm_wants_beneath_v1() -> None:
    with scripted_vllm(told=lora()) as vllm:
        async with speaking_to(vllm, api_key="of-requests", admin_key="of-changes") as engine:
            await refit(engine)
            await refit(engine, replace(TARGET, path="/root/g2-v7"))
    sent = [seen.headers.get("authorization") for seen in vllm.server.seen if (seen.method, seen.path) in CHANGES]
    assert sent == ["Bearer of-requests"] * 3


async def test_the_newest_adapters_stay_and_their_folders_count_as_folders_that_it_may_read() -> None:
    with scripted_vllm(told=lora()) as vllm:
        async with speaking_to(vllm, keep=2) as engine:
            for label in ("1", "2", "3"):
                done = await refit(engine, Target(path=f"/root/v{label}", label=label))
                assert done.outcome is Outcome.ACK
            seen = await probed(engine)
    assert vllm.adapters == {"actor-v2": "/root/v2", "actor-v3": "/root/v3"}
    # Requests for the one that was unloaded may be under way, and vLLM reads what it does not hold in memory.
    assert set(seen.may_read) == {"/root/v1", "/root/v2", "/root/v3"}
    assert set(done.may_read) == {"/root/v1", "/root/v2"}


@pytest.mark.parametrize("keep", [1, 2])
async def test_folders_of_adapters_that_were_unloaded_count_after_a_restart_of_the_service_as_well(keep: int) -> None:
    """Until as many were unloaded since as count. The journal knows of those before, the server lists none of them."""
    known = record()
    with scripted_vllm(told=lora()) as vllm:
        async with speaking_to(vllm, keep=keep) as engine:
            for label in range(1, 2 * keep + 1):
                await refit(engine, Target(path=f"/root/v{label}", label=str(label)))
            known = after_probe(known, await probed(engine), None, None, 0.0)
        unloaded = {f"/root/v{label}" for label in range(1, keep + 1)}
        assert unloaded < set(known.debts.may_read)
        async with speaking_to(vllm, keep=keep) as engine:
            known = after_probe(known, await probed(engine), None, None, 0.0)
            assert unloaded < set(known.debts.may_read)
            for label in range(2 * keep + 1, 3 * keep + 1):
                done = await refit(engine, Target(path=f"/root/v{label}", label=str(label)))
                known = after_refit(known, f"run~v{label}", done, 0.0)
                assert unloaded < set(known.debts.may_read), "requests for them may be under way"
            known = after_probe(known, await probed(engine), None, None, 0.0)
    assert set(known.debts.may_read) == {f"/root/v{label}" for label in range(keep + 1, 3 * keep + 1)}


async def test_a_server_that_was_restarted_reads_no_folder_of_before() -> None:
    with scripted_vllm(told=lora()) as vllm:
        async with speaking_to(vllm) as engine:
            await refit(engine)
            known = after_probe(record(), await probed(engine), None, None, 0.0)
        vllm.adapters.clear()
        vllm.told["vllm_config"]["instance_id"] = "1795396894577821545"
        async with speaking_to(vllm) as engine:
            known = after_probe(known, await probed(engine), None, None, 0.0)
    assert known.debts.may_read == ()


async def test_the_same_step_of_another_run_is_never_loaded_in_place_and_finds_an_empty_cache() -> None:
    with scripted_vllm(told=lora()) as vllm:
        async with speaking_to(vllm) as engine:
            await refit(engine)
            done = await refit(engine, replace(TARGET, path="/root/g2-v7"))
    assert done.outcome is Outcome.ACK
    assert vllm.changes == [LOAD, UNLOAD, LOAD, RESET]
    assert vllm.adapters == {"actor-v7": "/root/g2-v7"}


async def test_an_adapter_whose_answer_is_no_number_is_unloaded_and_leaves_contents_unknown() -> None:
    with scripted_vllm(told=lora()) as vllm:
        async with speaking_to(vllm) as engine:
            await refit(engine, Target(path="/root/v6", label="6"))
            vllm.on(ANSWER, NO_NUMBER)
            done = await refit(engine)
            seen = await probed(engine)
    # NaN stays behind in what the engine keeps: other adapters may answer so from now on.
    assert (done.outcome, done.resumed) == (Outcome.TAINTED, True)
    assert "Out of range float values" in (done.reason or "")
    assert "restart it" in (done.reason or "")
    assert vllm.adapters == {"actor-v6": "/root/v6"}
    assert seen.weight_version == "6"


async def test_an_answer_that_a_clean_load_of_the_version_did_not_give_is_not_believed() -> None:
    with scripted_vllm(told=lora()) as vllm:
        async with speaking_to(vllm) as engine:
            clean = await refit(engine)
            vllm.on(ANSWER, vllm.completion(-1.0))
            done = await refit(engine, replace(TARGET, path="/root/v7", fingerprint=clean.fingerprint))
    assert (done.outcome, vllm.adapters) == (Outcome.NACK, {})
    assert "clean load" in (done.reason or "")


async def test_an_adapter_that_cannot_be_unloaded_after_a_doubt_leaves_contents_unknown() -> None:
    with scripted_vllm(told=lora()) as vllm:
        async with speaking_to(vllm) as engine:
            vllm.on(ANSWER, NO_NUMBER)
            vllm.on(UNLOAD, hang_up)
            done = await refit(engine)
    assert done.outcome is Outcome.TAINTED


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [(error(500, SHAPE), Outcome.NACK), (page(200), Outcome.NACK), (hang_up, Outcome.TAINTED)],
)
async def test_a_load_that_fails_leaves_the_adapters_from_before(reply: Step, outcome: Outcome) -> None:
    with scripted_vllm(told=lora()) as vllm:
        async with speaking_to(vllm) as engine:
            await refit(engine, Target(path="/root/v6", label="6"))
            vllm.on(LOAD, reply)
            done = await refit(engine)
            assert (done.outcome, done.resumed) == (outcome, True)
            assert vllm.adapters == {"actor-v6": "/root/v6"}
            assert (await refit(engine)).outcome is Outcome.ACK


async def test_files_that_changed_while_they_were_read_are_not_served() -> None:
    with scripted_vllm(told=lora()) as vllm:
        async with speaking_to(vllm) as engine:
            done = await refit(engine, replace(TARGET, unchanged=lambda: asyncio.sleep(0, result=False)))
    assert done.outcome is Outcome.TAINTED


@pytest.mark.parametrize(
    ("state", "fix"),
    [
        ({}, "--enable-lora"),
        ({"told": lora(), "absent": frozenset({LOAD})}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
    ],
)
async def test_a_server_that_loads_no_adapters_says_how_to_start_it(state: dict[str, Any], fix: str) -> None:
    with scripted_vllm(**state) as vllm:
        async with speaking_to(vllm) as engine:
            seen = await engine.probe()
            done = await refit(engine)
    assert isinstance(seen, Unreached)
    assert (fix in seen.reason, fix in seen.advice, seen.recognised) == (True, True, True)
    assert (done.outcome, vllm.changes) == (Outcome.UNREACHABLE, [])


async def test_a_cache_for_fewer_adapters_than_stay_loaded_is_said() -> None:
    with scripted_vllm(told=lora()) as vllm:
        async with speaking_to(vllm, keep=5) as engine:
            (obstacle,) = (await probed(engine)).obstacles
    assert (obstacle.blocks, "--max-cpu-loras 6" in obstacle.fix) == (False, True)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"data_parallel_size": 2}, "data-parallel"),
        ({"pipeline_parallel_size": 2}, "pipeline stages"),
        ({"enable_eplb": True}, "--enable-eplb"),
    ],
)
async def test_what_cannot_be_done_right_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with scripted_vllm(told=lora(**changes)) as vllm:
        async with speaking_to(vllm) as engine:
            done = await refit(engine)
    assert (done.outcome, vllm.changes) == (Outcome.NACK, [])
    assert named in (done.reason or "")


async def test_an_engine_that_sleeps_is_left_alone() -> None:
    told = lora()
    told["vllm_config"]["model_config"]["enable_sleep_mode"] = True
    with scripted_vllm(told=told, paused=True) as vllm:
        async with speaking_to(vllm) as engine:
            done = await refit(engine)
    assert (done.outcome, vllm.changes) == (Outcome.UNREACHABLE, [])
    assert "/wake_up" in (done.reason or "")


async def test_after_a_load_that_failed_on_several_ranks_nothing_counts_until_a_restart() -> None:
    with scripted_vllm(told=lora(tensor_parallel_size=2)) as vllm:
        async with speaking_to(vllm) as engine:
            vllm.on(LOAD, error(500, SHAPE))
            first = await refit(engine)
            await engine.probe()
            second = await refit(engine)
            assert (first.outcome, second.outcome, vllm.changes) == (Outcome.TAINTED, Outcome.TAINTED, [LOAD])
            assert "restart it" in (second.reason or "")
            vllm.told["vllm_config"]["instance_id"] = "1795396894577821545"
            vllm.on("/weight_info", hang_up)
            await engine.probe()
            await engine.probe()
            assert (await refit(engine)).outcome is Outcome.ACK


async def test_a_restart_and_a_model_that_another_has_loaded_beneath_leave_no_adapter_that_counts() -> None:
    with scripted_vllm(told=lora()) as vllm:
        async with speaking_to(vllm) as engine:
            await refit(engine)
            vllm.label = "9"
            beneath = await probed(engine)
            vllm.adapters.clear()
            restarted = await probed(engine)
    assert (beneath.weight_version, restarted.weight_version) == (None, None)


async def test_a_trial_is_answered_by_the_adapter_that_it_names() -> None:
    with scripted_vllm(told=lora()) as vllm:
        async with speaking_to(vllm) as engine:
            assert "does not exist" in (await engine.trial("7") or "")
            await refit(engine)
            assert await engine.trial("7") is None
            assert await engine.resume()


async def test_a_server_that_does_not_answer_says_why() -> None:
    with scripted_vllm(told=lora()) as vllm:
        async with speaking_to(vllm) as engine:
            vllm.on("/weight_info", answer(401, {"error": "Unauthorized"}))
            seen = await engine.probe()
            vllm.on("/v1/models", answer(200, {"data": 7}))
            other = await engine.probe()
    assert isinstance(seen, Unreached)
    assert isinstance(other, Unreached)
    assert "another form" in other.reason
