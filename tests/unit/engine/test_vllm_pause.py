"""What the adapter to vLLM sends while a server is paused: nothing is written before it has paused, and nothing that it
serves afterwards is of other weights than its label says.
"""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from http.server import BaseHTTPRequestHandler

import pytest

from refitd.engine.port import Outcome, Refit, Target
from refitd.engine.transaction import ServerEngine
from support.engines import vllm_engine
from support.scripted_server import PATIENCE, Step, answer, cut, hang_up, page
from support.scripted_vllm import SHAPE, ScriptedVllm, config, error, scripted_vllm

TARGET = Target(path="/root/v7", label="7")
KNOWN, NEWER = "0.32.0", "0.34.0"
ROUTES = {KNOWN: ("/sleep", "/wake_up"), NEWER: ("/pause", "/resume")}
LOAD, RESET, LABEL = "reload_weights", "/reset_prefix_cache", "/update_weight_version"
MODES = ("keep", "wait", "abort")

of_each_release = pytest.mark.parametrize("release", [KNOWN, NEWER])
in_each_mode = pytest.mark.parametrize("mode", MODES)


@asynccontextmanager
async def speaking_to(vllm: ScriptedVllm, mode: str = "keep") -> AsyncIterator[ServerEngine]:
    async with aclosing(vllm_engine(vllm.url, pause_mode=mode)) as engine:
        await engine.probe()
        yield engine


async def refit(engine: ServerEngine, target: Target = TARGET) -> Refit:
    return await engine.refit(target, lambda _: None)


def pause_call(release: str, mode: str) -> str:
    """The call that pauses."""
    return f"/sleep?level=0&mode={mode}" if release == KNOWN else f"/pause?mode={mode}"


def while_it_looks_paused(vllm: ScriptedVllm, step: Step) -> Step:
    """A step of a pause that is not complete: /is_paused says so from its begin on."""

    def looks_paused(handler: BaseHTTPRequestHandler) -> None:
        vllm.paused = True
        step(handler)

    return looks_paused


@of_each_release
@in_each_mode
async def test_nothing_is_loaded_before_the_server_says_that_its_pause_is_complete(release: str, mode: str) -> None:
    """/is_paused says so before: requests still run in `wait`, and in each mode the step that was under way."""
    begun, ended = threading.Event(), threading.Event()
    with scripted_vllm(version=release) as vllm:
        pause = ROUTES[release][0]

        def slow(handler: BaseHTTPRequestHandler) -> None:
            begun.set()
            assert ended.wait(PATIENCE)
            vllm.work(pause, handler.path, {})(handler)

        async with speaking_to(vllm, mode) as engine:
            vllm.on(pause, while_it_looks_paused(vllm, slow))
            refitting = asyncio.create_task(refit(engine))
            assert await asyncio.to_thread(begun.wait, PATIENCE)
            assert vllm.loads == []
            ended.set()
            done = await refitting
    assert (done.outcome, done.resumed) == (Outcome.ACK, True)
    assert vllm.changes[:2] == [pause_call(release, mode), LOAD]


@of_each_release
@in_each_mode
@pytest.mark.parametrize(
    ("fails", "outcome"),
    [
        (error(500, SHAPE), Outcome.NACK),
        (page(200), Outcome.NACK),
        (answer(200, {"status": "sleeping soon"}), Outcome.NACK),
        (hang_up, Outcome.UNREACHABLE),
        (cut, Outcome.UNREACHABLE),
    ],
)
async def test_a_pause_that_fails_while_the_server_looks_paused_is_taken_back_and_nothing_is_loaded(
    release: str, mode: str, fails: Step, outcome: Outcome
) -> None:
    with scripted_vllm(version=release) as vllm:
        pause, resume = ROUTES[release]
        async with speaking_to(vllm, mode) as engine:
            vllm.on(pause, while_it_looks_paused(vllm, fails))
            done = await refit(engine)
    assert (done.outcome, done.resumed) == (outcome, True)
    assert [call.partition("?")[0] for call in vllm.changes] == [pause, resume]
    assert not vllm.paused


@pytest.mark.parametrize(
    ("release", "absent", "pause"),
    [
        ("0.27.1", "", "/pause"),
        ("0.31.9", "", "/pause"),
        ("0.32.0", "", "/sleep"),
        ("0.33.0+cpu", "", "/sleep"),
        ("0.34.0", "", "/pause"),
        ("1.0", "", "/pause"),
        ("built here", "", "/pause"),
        ("0.32.0", "/sleep", "/pause"),
        ("0.32.0", "/wake_up", "/pause"),
    ],
)
async def test_sleep_pauses_only_where_that_is_known_of_the_release_and_a_proxy_lets_it_pass(
    release: str, absent: str, pause: str
) -> None:
    with scripted_vllm(version=release, absent=frozenset({absent})) as vllm:
        async with speaking_to(vllm) as engine:
            done = await refit(engine)
    assert (done.outcome, done.resumed) == (Outcome.ACK, True)
    assert vllm.changes[0].startswith(pause)


@of_each_release
async def test_caches_are_emptied_and_the_label_is_set_at_once_and_it_is_resumed_when_both_are_done(
    release: str,
) -> None:
    """Each of the two waits for the other one here: one after the other would never end."""
    told = config()
    told["vllm_config"]["model_config"]["multimodal_config"] = {}
    both, resumed = threading.Barrier(2), ROUTES[release][1]
    with scripted_vllm(version=release, told=told) as vllm:

        def together(handler: BaseHTTPRequestHandler) -> None:
            both.wait(PATIENCE)
            assert not any(call.startswith(resumed) for call in vllm.changes)
            route = RESET if handler.path.startswith(RESET) else LABEL
            vllm.work(route, handler.path, {"new_version": "7"})(handler)

        async with speaking_to(vllm) as engine:
            vllm.on(RESET, together)
            vllm.on(LABEL, together)
            done = await refit(engine)
    assert (done.outcome, done.resumed) == (Outcome.ACK, True)
    routes = [call.partition("?")[0] for call in vllm.changes]
    assert routes[2:-1] == [RESET, "/reset_mm_cache", "/reset_encoder_cache", LABEL]
    assert routes[-1] == resumed


async def test_a_label_that_another_program_sets_during_the_load_is_seen_before_this_one_sets_its_own() -> None:
    """Afterwards the other's weights would be served under this one's label."""
    with scripted_vllm() as vllm:

        def intrudes(handler: BaseHTTPRequestHandler) -> None:
            vllm.label = "41"
            vllm.work("/collective_rpc", handler.path, {"method": LOAD, "kwargs": {"weights_path": "/other/v41"}})(
                handler
            )

        async with speaking_to(vllm) as engine:
            vllm.on(LOAD, intrudes)
            done = await refit(engine)
    assert (done.outcome, done.resumed, done.overwritten) == (Outcome.TAINTED, False, True)
    assert vllm.label == "41"
    assert vllm.changes[-1] == LOAD


async def test_a_server_that_has_no_weights_in_memory_is_not_said_to_be_resumed() -> None:
    with scripted_vllm(paused=True) as vllm:
        async with speaking_to(vllm) as engine:
            vllm.on("/wake_up", answer(200, {"status": "sleeping", "tags": ["scheduling"]}))
            assert await engine.resume() is False
            assert await engine.resume() is True
