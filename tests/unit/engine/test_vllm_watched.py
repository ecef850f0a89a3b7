"""A vLLM whose engine dies answers no call that waits for it: its /health, on another connection, ends the wait.

Each test would otherwise last ten minutes, the time that a load may take.
"""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from refitd.engine.http import CallFailure, NoReply, Reply, Transport
from refitd.engine.port import Outcome, Target, Unreached
from refitd.engine.transaction import ServerEngine
from refitd.engine.vllm import dialect
from support.engines import vllm_adapters, vllm_engine
from support.scripted_server import PATIENCE, Step, silence
from support.scripted_vllm import DEAD, ScriptedVllm, config, error, scripted_vllm

TARGET = Target(path="/root/v7", label="7")
REPAIR = Target(path="/root/v7", label="7", repairs=True)
PAUSE, LOAD = "/sleep?level=0&mode=keep", "reload_weights"


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialect, "LOOK_EVERY_SECONDS", 0.01)


@asynccontextmanager
async def speaking_to(vllm: ScriptedVllm, pause_mode: str = "auto") -> AsyncIterator[ServerEngine]:
    async with aclosing(vllm_engine(vllm.url, pause_mode=pause_mode)) as engine:
        await engine.probe()
        yield engine


def dies(vllm: ScriptedVllm) -> Step:
    """A step that ends the engine and answers nothing."""

    def step(handler: BaseHTTPRequestHandler) -> None:
        vllm.dead = True
        silence(handler)

    return step


async def test_a_load_in_which_the_engine_dies_leaves_it_paused_and_says_restart_it() -> None:
    with scripted_vllm() as vllm:
        async with speaking_to(vllm) as engine:
            vllm.on(LOAD, dies(vllm))
            done = await engine.refit(TARGET, lambda _: None)
            vllm.on("/weight_info", error(500, DEAD))
            seen = await engine.probe()
    assert (done.outcome, done.resumed) == (Outcome.TAINTED, False)
    assert "its engine has died: restart it" in (done.reason or "")
    assert vllm.changes == [PAUSE, LOAD]
    assert isinstance(seen, Unreached)
    assert "restart it" in seen.reason


async def test_an_engine_that_died_in_a_load_takes_an_update_once_it_was_restarted() -> None:
    with scripted_vllm() as vllm:
        async with speaking_to(vllm) as engine:
            vllm.on(LOAD, dies(vllm))
            await engine.refit(TARGET, lambda _: None)
            vllm.on("/sleep", error(500, DEAD))
            still = await engine.refit(REPAIR, lambda _: None)
            vllm.dead = False
            back = await engine.refit(REPAIR, lambda _: None)
    assert (still.outcome, back.outcome) == (Outcome.TAINTED, Outcome.ACK)
    assert "restart it" in (still.reason or "")


async def test_a_server_that_takes_no_connections_any_more_ends_the_load_that_it_does_not_answer() -> None:
    with scripted_vllm() as vllm:
        async with speaking_to(vllm) as engine:
            vllm.on(LOAD, silence)
            loading = asyncio.create_task(engine.refit(TARGET, lambda _: None))
            await vllm.server.until("/collective_rpc", times=2)  # the first one asked whether it is there
            vllm.server.stop_listening()
            done = await loading
            seen = await engine.probe()
    assert (done.outcome, done.resumed) == (Outcome.TAINTED, False)
    assert "takes no connections any more" in (done.reason or "")
    assert isinstance(seen, Unreached)


REFUSED = NoReply(CallFailure.NEVER_SENT, "connection refused", nothing_listens=True)


@pytest.mark.parametrize(
    "looks",
    [
        [Reply(503, b"<html>of a proxy</html>")],
        [Reply(404, b"Not Found")],
        [Reply(500, b"")],
        [NoReply(CallFailure.TIMED_OUT, "did not answer within 5 s")],
        [REFUSED, REFUSED, NoReply(CallFailure.NEVER_SENT, "its key's file cannot be read"), REFUSED, REFUSED],
    ],
)
async def test_a_load_that_takes_long_is_waited_for_unless_vllm_itself_says_that_its_engine_is_dead(
    looks: list[Reply | NoReply], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, let_go = threading.Event(), threading.Event()
    call = Transport._call

    async def looked(self: Transport, method: str, path: str, *rest: Any) -> Reply | NoReply:
        if path != "/health" or not begun.is_set():
            return await call(self, method, path, *rest)
        if not looks:
            let_go.set()
        return looks.pop(0) if looks else Reply(200, b"")

    def late(handler: BaseHTTPRequestHandler) -> None:
        begun.set()
        let_go.wait(PATIENCE)
        vllm.step(handler)

    monkeypatch.setattr(Transport, "_call", looked)
    with scripted_vllm() as vllm:
        async with speaking_to(vllm) as engine:
            vllm.on(LOAD, late)
            done = await engine.refit(TARGET, lambda _: None)
    assert done.outcome is Outcome.ACK
    assert vllm.loads == ["/root/v7"]


async def test_a_refit_that_is_cancelled_in_a_load_closes_its_connection_and_looks_no_more() -> None:
    with scripted_vllm() as vllm:
        async with speaking_to(vllm) as engine:
            vllm.on(LOAD, silence)
            gone = asyncio.create_task(engine.refit(TARGET, lambda _: None))
            await vllm.server.until("/collective_rpc", times=2)
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
            assert asyncio.all_tasks() == {asyncio.current_task()}
    assert vllm.changes == [PAUSE, LOAD]


async def test_an_adapter_s_load_in_which_the_engine_dies_leaves_unknown_contents() -> None:
    told = config()
    told["vllm_config"]["lora_config"] = {"max_loras": 1, "max_cpu_loras": 2}
    with scripted_vllm(told=told) as vllm:
        engine = vllm_adapters(vllm.url, name="policy")
        await engine.probe()
        vllm.on("/v1/load_lora_adapter", dies(vllm))
        done = await engine.refit(TARGET, lambda _: None)
        await engine.aclose()
    assert done.outcome is Outcome.TAINTED
    assert done.reason == "its engine has died: restart it"
