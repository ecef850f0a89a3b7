"""Which calls the adapter sends when a server misbehaves.

The rule behind all: nothing with unknown contents is resumed, and nothing with known contents stays paused.
"""

import asyncio
import threading
from contextlib import aclosing
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from refitd.engine import http
from refitd.engine.port import Outcome, Reached, Refit, Target, Unreached
from refitd.engine.sglang import dialect
from refitd.engine.transaction import ServerEngine
from support.engines import sglang_engine
from support.scripted_server import Step, answer, hang_up, silence
from support.scripted_sglang import NO_FILES, ScriptedSglang, said, scripted_sglang

TARGET = Target(path="/root/v7", label="7")
REPAIR = Target(path="/root/v7", label="7", repairs=True)
PAUSE, LOAD, RESUME = "/pause_generation", "/update_weights_from_disk", "/continue_generation"
FLUSH, CHECK = "/flush_cache", "/weights_checker"
NOT_FLUSHED = "Weights were updated, but the cache was not flushed because requests are still running or queued."


def speaking_to(sglang: ScriptedSglang, **options: Any) -> aclosing[ServerEngine]:
    return aclosing(sglang_engine(sglang.url, **options))


async def refit(engine: ServerEngine, target: Target = TARGET) -> Refit:
    return await engine.refit(target, lambda _: None)


async def test_a_good_refit_pauses_loads_verifies_and_resumes() -> None:
    with scripted_sglang() as sglang:
        async with speaking_to(sglang) as engine:
            done = await refit(engine)
    assert (done.outcome, done.resumed, done.reason) == (Outcome.ACK, True, None)
    assert sglang.changes == [PAUSE, LOAD, RESUME]
    assert sglang.bodies(PAUSE) == [{"mode": "retract"}]
    assert sglang.bodies(LOAD) == [
        {
            "model_path": "/root/v7",
            "load_format": "auto",
            "weight_version": "7",
            "flush_cache": True,
            "abort_all_requests": False,
            "torch_empty_cache": False,
        }
    ]


@pytest.mark.parametrize("reply", [said(400, NO_FILES), answer(401, {}), answer(404, {"detail": "Not Found"})])
async def test_a_refusal_that_left_everything_as_it_was_is_followed_by_resume(reply: Step) -> None:
    with scripted_sglang() as sglang:
        sglang.on(LOAD, reply)
        async with speaking_to(sglang) as engine:
            done = await refit(engine)
            assert done.fingerprint == await engine.fingerprint()
    assert (done.outcome, done.resumed) == (Outcome.NACK, True)
    assert sglang.changes == [PAUSE, LOAD, RESUME]


async def test_a_cache_that_running_requests_hold_after_the_load_taints_and_the_repair_retracts_them() -> None:
    with scripted_sglang() as sglang:
        sglang.on(LOAD, said(400, NOT_FLUSHED))
        async with speaking_to(sglang) as engine:
            done = await refit(engine)
            assert (done.outcome, done.resumed) == (Outcome.TAINTED, False)
            assert "cache was not flushed" in (done.reason or "")
            assert (await refit(engine, REPAIR)).outcome is Outcome.ACK
    assert sglang.bodies(PAUSE) == [{"mode": "retract"}, {"mode": "retract"}]
    assert sglang.changes == [PAUSE, LOAD, PAUSE, LOAD, RESUME]


def told(arrived: threading.Event) -> Step:
    """Never answer, but say that the request is there."""

    def step(handler: BaseHTTPRequestHandler) -> None:
        arrived.set()
        silence(handler)

    return step


@pytest.mark.parametrize(
    ("route", "target", "changes"),
    [
        (PAUSE, TARGET, [PAUSE, RESUME]),
        ("/weights_checker", TARGET, [PAUSE, RESUME]),
        (PAUSE, REPAIR, [PAUSE]),
        (LOAD, TARGET, [PAUSE, LOAD]),
    ],
)
async def test_a_service_that_stops_in_between_resumes_what_it_knows_and_nothing_else(
    route: str, target: Target, changes: list[str]
) -> None:
    arrived = threading.Event()
    with scripted_sglang() as sglang:
        sglang.on(route, told(arrived))
        async with speaking_to(sglang) as engine:
            running = asyncio.create_task(refit(engine, target))
            await asyncio.to_thread(arrived.wait, 10)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
    assert sglang.changes == changes


async def test_redirects_are_not_followed_so_that_keys_go_nowhere_else() -> None:
    with scripted_sglang() as other, scripted_sglang() as sglang:
        sglang.on("/model_info", answer(302, b"", Location=f"{other.url}/model_info"))
        async with speaking_to(sglang, api_key="secret") as engine:
            seen = await engine.probe()
    assert isinstance(seen, Unreached)
    assert "answered 302" in seen.reason
    assert other.calls == []


async def test_a_body_without_end_is_cut_off() -> None:
    with scripted_sglang() as sglang:
        sglang.on("/model_info", answer(200, b" " * (http.MAX_BODY_BYTES + 1)))
        async with speaking_to(sglang) as engine:
            seen = await engine.probe()
    assert isinstance(seen, Unreached)
    assert f"more than {http.MAX_BODY_BYTES} bytes" in seen.reason


async def test_reads_carry_the_api_key_and_changes_the_admin_key() -> None:
    with scripted_sglang() as sglang:
        async with speaking_to(sglang, api_key="reads", admin_key="changes") as engine:
            await refit(engine)
    for seen in sglang.server.seen:
        expected = "Bearer reads" if seen.method == "GET" else "Bearer changes"
        assert seen.headers["authorization"] == expected


@pytest.mark.parametrize(
    ("version", "label", "startup"),
    [("0.5.12", "default", "/base"), ("0.5.12", "7", None), ("0.5.20", "7", "/base")],
)
async def test_the_startup_model_is_believed_only_where_the_server_still_names_it(
    version: str, label: str, startup: str | None
) -> None:
    served = {"model_path": "/base", "weight_version": label}
    with scripted_sglang(version=version, served=served) as sglang:
        async with speaking_to(sglang) as engine:
            seen = await engine.probe()
            assert isinstance(seen, Reached)
            assert seen.startup_path == startup
            # From then on it names what it was last told to load, and is asked again since its label has changed.
            sglang.served = {"model_path": "/root/v8", "weight_version": "8"}
            sglang.launched = "/root/v8" if version == "0.5.12" else "/base"
            seen = await engine.probe()
            assert isinstance(seen, Reached)
            assert seen.startup_path == startup


async def test_a_probe_asks_for_launch_settings_only_when_the_server_may_be_another() -> None:
    with scripted_sglang() as sglang:
        async with speaking_to(sglang) as engine:
            await refit(engine)
            await engine.probe()
            await engine.probe()
            assert sglang.calls.count("/server_info") == 1
            sglang.served = {"model_path": "/base", "weight_version": "default"}
            await engine.probe()
    assert sglang.calls.count("/server_info") == 2


async def test_the_fingerprint_does_not_depend_on_the_order_in_which_ranks_answer() -> None:
    with scripted_sglang() as sglang:
        async with speaking_to(sglang) as engine:
            await engine.probe()
            prints: list[str | None] = []
            for ranks in ([{"a": "1"}, {"a": "2"}], [{"a": "2"}, {"a": "1"}], [{"a": "1"}, {"a": "1"}]):
                sglang.ranks = ranks
                prints.append(await engine.fingerprint())
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize(
    "reply", [answer(400, {"success": False}), answer(200, {"ranks": []}), answer(200, {"ranks": [{}]}), hang_up]
)
async def test_a_server_that_gives_no_checksums_has_no_fingerprint(reply: Step) -> None:
    with scripted_sglang() as sglang:
        sglang.on("/weights_checker", reply)
        async with speaking_to(sglang) as engine:
            assert await engine.fingerprint() is None


STILL_RUNNING = answer(400, b"Flush cache failed.")


@pytest.mark.parametrize(
    ("version", "wanted", "mode"),
    [("0.5.20", "retract", "abort"), ("0.5.20", "keep", "abort"), ("0.5.21", "keep", "retract")],
)
async def test_a_server_that_dies_of_a_flush_is_told_to_load_only_when_a_flush_has_gone_well(
    version: str, wanted: str, mode: str
) -> None:
    with scripted_sglang(version=version) as sglang:
        sglang.on(FLUSH, STILL_RUNNING, STILL_RUNNING)
        async with speaking_to(sglang, pause_mode=wanted) as engine:
            done = await refit(engine)
    assert (done.outcome, done.resumed) == (Outcome.ACK, True)
    assert sglang.bodies(PAUSE) == [{"mode": mode}]
    assert sglang.changes == [PAUSE, FLUSH, FLUSH, FLUSH, LOAD, RESUME]


async def test_a_server_that_would_die_of_the_load_is_let_go_on_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialect, "CALL_SECONDS", 0.3)
    with scripted_sglang(version="0.5.21") as sglang:
        sglang.on(FLUSH, *[STILL_RUNNING] * 1000)
        async with speaking_to(sglang) as engine:
            done = await refit(engine)
    assert (done.outcome, done.resumed) == (Outcome.NACK, True)
    assert "requests still run" in (done.reason or "")
    assert LOAD not in sglang.calls
    assert sglang.calls[-1] == RESUME


async def test_the_same_step_of_another_run_ends_running_answers_because_both_have_one_label() -> None:
    again = Target(path="/root/other/v7", label="7")
    with scripted_sglang() as sglang:
        async with speaking_to(sglang) as engine:
            for target in (TARGET, again, again):
                assert (await refit(engine, target)).outcome is Outcome.ACK
    assert [body["mode"] for body in sglang.bodies(PAUSE)] == ["retract", "abort", "retract"]


async def test_a_service_that_was_restarted_ends_running_answers_of_the_same_step_of_another_run_as_well() -> None:
    with scripted_sglang(served={"model_path": "/root/other/v7", "weight_version": "7"}) as sglang:
        async with speaking_to(sglang) as engine:
            assert (await refit(engine)).outcome is Outcome.ACK
    assert [body["mode"] for body in sglang.bodies(PAUSE)] == ["abort"]


async def test_the_same_step_of_another_run_is_not_loaded_where_running_answers_cannot_be_ended() -> None:
    again = Target(path="/root/other/v7", label="7")
    with scripted_sglang() as sglang:
        async with speaking_to(sglang) as engine:
            await refit(engine)
            sglang.on(PAUSE, answer(500, {"detail": "no"}))
            done = await refit(engine, again)
    assert (done.outcome, done.resumed) == (Outcome.NACK, True)
    assert sglang.changes == [PAUSE, LOAD, RESUME, PAUSE, RESUME]


@pytest.mark.parametrize(("path", "overwritten"), [("/other/v3", True), ("/base", False)])
async def test_what_another_writer_loads_at_the_same_time_is_told_from_a_load_that_failed(
    path: str, overwritten: bool
) -> None:
    with scripted_sglang() as sglang:

        def loaded(handler: BaseHTTPRequestHandler) -> None:
            sglang.served = {"model_path": path, "weight_version": "3"}
            said(200, "Succeeded to update model weights.")(handler)

        sglang.on(LOAD, loaded)
        async with speaking_to(sglang) as engine:
            done = await refit(engine)
    assert (done.outcome, done.resumed, done.overwritten) == (Outcome.TAINTED, False, overwritten)
