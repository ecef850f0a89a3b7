"""Prefill and decode servers that are updated as one engine: no keys and values of one policy meet another."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from refitd.engine.port import Outcome, Reached, Refit, Target, Unreached
from refitd.engine.sglang.pair import SglangPair, outcome_of
from support.engines import sglang_pair
from support.scripted_server import answer, hang_up, silence
from support.scripted_sglang import NO_FILES, ScriptedSglang, said, scripted_sglang

TARGET = Target(path="/root/v7", label="7")
PAUSE, FLUSH, LOAD, RESUME = "/pause_generation", "/flush_cache", "/update_weights_from_disk", "/continue_generation"


@contextmanager
def halves(*roles: str) -> Iterator[list[ScriptedSglang]]:
    with ExitStack() as stack:
        servers = [stack.enter_context(scripted_sglang()) for _ in roles]
        for server, role in zip(servers, roles, strict=True):
            server.told |= {"disaggregation_mode": role, "disaggregation_bootstrap_port": 8998}
        yield servers


@asynccontextmanager
async def unit_of(servers: list[ScriptedSglang], **options: Any) -> AsyncIterator[SglangPair]:
    unit = sglang_pair(*(server.url for server in servers), **options)
    yield unit
    await unit.aclose()


async def refit(unit: SglangPair, target: Target = TARGET) -> Refit:
    return await unit.refit(target, lambda _: None)


async def test_all_are_paused_and_empty_before_one_loads_and_all_are_proved_before_one_goes_on() -> None:
    order: list[tuple[str, str]] = []
    with halves("prefill", "decode", "decode") as servers:
        for server in servers:
            step = server.step

            def noted(handler: Any, step: Any = step) -> None:
                order.append((handler.path, handler.headers["host"]))
                step(handler)

            server.server.steps[:] = [noted]
        async with unit_of(servers) as unit:
            done = await refit(unit)
            seen = await unit.probe()
    assert (done.outcome, done.resumed, done.reason) == (Outcome.ACK, True, None)
    calls = [path for path, _ in order]
    loads = [at for at, path in enumerate(calls) if path == LOAD]
    assert max(at for at, path in enumerate(calls) if path in {PAUSE, FLUSH}) < min(loads)
    proofs = [at for at, path in enumerate(calls) if path == "/weights_checker" and at > max(loads)]
    assert max(proofs) < min(at for at, path in enumerate(calls) if path == RESUME)
    assert [calls.count(path) for path in (PAUSE, LOAD, RESUME)] == [3, 3, 3]
    assert [body["mode"] for server in servers for body in server.bodies(PAUSE)] == ["abort"] * 3
    assert isinstance(seen, Reached)
    assert (seen.model_path, seen.weight_version, seen.obstacles) == ("/root/v7", "7", ())


@pytest.mark.parametrize("late", [0, 1])
async def test_where_one_cannot_be_emptied_none_loads_and_all_go_on(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refitd.engine.sglang.dialect.CALL_SECONDS", 1.0)  # a call's own limit as well
    with halves("prefill", "decode") as servers:
        servers[late].on(FLUSH, *[answer(400, b"still transferring")] * 100)
        async with unit_of(servers) as unit:
            done = await refit(unit)
    assert (done.outcome, done.resumed) == (Outcome.NACK, True)
    assert servers[late].url in (done.reason or "")
    assert all(LOAD not in server.calls and server.changes[-1] == RESUME for server in servers)


async def test_where_one_refuses_what_the_other_has_loaded_both_stay_paused_until_both_have_loaded() -> None:
    with halves("prefill", "decode") as servers:
        servers[1].on(LOAD, said(400, NO_FILES))
        async with unit_of(servers) as unit:
            done = await refit(unit)
            assert (done.outcome, done.resumed) == (Outcome.TAINTED, False)
            assert "a part of its servers serves it" in (done.reason or "")
            assert all(RESUME not in server.calls for server in servers)
            again = await refit(unit, replace(TARGET, repairs=True))
    assert (again.outcome, again.resumed) == (Outcome.ACK, True)
    assert all(server.served["weight_version"] == "7" for server in servers)


async def test_where_none_has_loaded_all_go_on_with_what_they_served() -> None:
    with halves("prefill", "decode") as servers:
        for server in servers:
            server.on(LOAD, said(400, NO_FILES))
        async with unit_of(servers) as unit:
            done = await refit(unit)
    assert (done.outcome, done.resumed) == (Outcome.NACK, True)
    assert all(server.changes[-1] == RESUME for server in servers)


async def test_a_member_that_dies_in_its_load_leaves_the_unit_paused() -> None:
    with halves("prefill", "decode") as servers:
        servers[0].on(LOAD, hang_up)
        async with unit_of(servers) as unit:
            done = await refit(unit)
    assert (done.outcome, done.resumed) == (Outcome.TAINTED, False)
    assert RESUME not in servers[1].calls


@pytest.mark.parametrize("at", [FLUSH, LOAD])
async def test_a_service_that_is_stopped_resumes_a_unit_only_before_its_loads(at: str) -> None:
    with halves("prefill", "decode") as servers:
        async with unit_of(servers) as unit:
            assert isinstance(await unit.probe(), Reached)
            servers[1].on(at, silence)
            task = asyncio.create_task(refit(unit))
            await servers[1].server.until(at)
            if at == LOAD:
                await servers[0].server.until("/weights_checker", 2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    assert [RESUME in server.calls for server in servers] == [at == FLUSH] * 2


async def test_a_unit_of_which_one_server_was_restarted_serves_no_version() -> None:
    with halves("prefill", "decode") as servers:
        for server in servers:
            server.told["random_seed"] = 1
        async with unit_of(servers) as unit:
            await refit(unit)
            before = await unit.probe()
            servers[1].served = {"model_path": "/base", "weight_version": "default"}
            servers[1].told["random_seed"] = 2
            after = await unit.probe()
    assert isinstance(before, Reached)
    assert isinstance(after, Reached)
    assert (after.model_path, after.weight_version) == ("/root/v7 and /base", None)
    assert after.may_read == ("/root/v7", "/base")
    assert after.process.is_as(before.process) is False


async def test_a_unit_is_reached_when_all_its_servers_are() -> None:
    with halves("prefill", "decode") as servers:
        async with unit_of(servers) as unit:
            servers[1].on("/model_info", answer(502, b"bad gateway"))
            seen = await unit.probe()
            done = await refit(unit)
    assert isinstance(seen, Unreached)
    assert servers[1].url in seen.reason
    assert done.outcome is Outcome.ACK


async def test_its_fingerprint_is_held_against_that_of_each_server() -> None:
    with halves("prefill", "decode") as servers:
        async with unit_of(servers) as unit:
            first = await refit(unit)
            assert await unit.fingerprint(first.fingerprint) == first.fingerprint
            servers[1].ranks = [{"w": "/other"}]
            assert await unit.fingerprint(first.fingerprint) != first.fingerprint
            servers[1].on("/weights_checker", *[answer(200, {"ranks": [{"checksums": {"w": "x"}}]})] * 2)
            wrong = await refit(unit, replace(TARGET, fingerprint=first.fingerprint))
    assert wrong.outcome is Outcome.TAINTED


@pytest.mark.parametrize(
    ("roles", "why"), [(("prefill", "prefill"), "--disaggregation-mode decode"), (("decode", "null"), "by itself")]
)
async def test_servers_that_are_no_pair_are_refused_by_name(roles: tuple[str, str], why: str) -> None:
    with halves(*roles) as servers:
        async with unit_of(servers) as unit:
            seen = await unit.probe()
            done = await refit(unit)
    assert done.outcome is Outcome.NACK
    assert why in (done.reason or "")
    assert isinstance(seen, Reached)
    assert why in seen.obstacles[0].text
    assert all(PAUSE not in server.calls for server in servers)


async def test_a_trial_goes_through_a_prefill_server_to_each_decode_server() -> None:
    tokens = answer(200, {"meta_info": {"output_token_logprobs": [[-0.5, 1, None]], "weight_version": "7"}})
    with halves("prefill", "decode", "decode") as servers:
        for server in servers:
            server.on("/generate", *[tokens] * 2)
        async with unit_of(servers) as unit:
            await unit.probe()
            assert await unit.trial("7") is None
            servers[2].on("/generate", answer(500, {"message": "no keys and values came"}))
            servers[0].on("/generate", *[tokens] * 2)
            servers[1].on("/generate", tokens)
            assert "no keys and values came" in (await unit.trial("7") or "")
        asked = [server.bodies("/generate")[0] for server in servers]
    assert asked[0] == asked[1]
    assert (asked[0]["bootstrap_host"], asked[0]["bootstrap_port"]) == ("127.0.0.1", 8998)


@pytest.mark.parametrize(
    ("outcomes", "whole"),
    [
        ("ACK ACK", "ACK"),
        ("NACK NACK", "NACK"),
        ("NACK UNREACHABLE", "UNREACHABLE"),
        ("ACK NACK", "TAINTED"),
        ("ACK UNREACHABLE", "TAINTED"),
        ("NACK TAINTED", "TAINTED"),
    ],
)
def test_its_contents_are_known_when_all_have_loaded_or_none(outcomes: str, whole: str) -> None:
    refits = [Refit(outcome=Outcome[name], resumed=False) for name in outcomes.split()]
    assert outcome_of(refits) is Outcome[whole]
