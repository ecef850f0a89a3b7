"""Which calls the adapter to vLLM sends when a server misbehaves.

The rule behind all: nothing with unknown contents is resumed, and nothing with known contents stays paused.
"""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from refitd.engine.plugin import Launch, PluginSeen
from refitd.engine.port import UNNAMED, Outcome, Reached, Refit, Stage, Target, Unreached
from refitd.engine.transaction import ServerEngine
from refitd.engine.vllm import contents
from refitd.policy.observe import Expected, after_probe
from support.engines import vllm_engine
from support.records import engine as record
from support.scripted_server import Step, answer, hang_up, page, silence
from support.scripted_vllm import DEAD, SHAPE, ScriptedVllm, config, error, scripted_vllm

TARGET = Target(path="/root/v7", label="7")
REPAIR = Target(path="/root/v7", label="7", repairs=True)
PAUSE, LOAD, RESUME = "/sleep?level=0&mode=keep", "reload_weights", "/wake_up?tags=scheduling"
LABEL = "/update_weight_version"
RESET = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
GOOD = [PAUSE, LOAD, RESET, LABEL, RESUME]
REPAIRED = [PAUSE, LOAD, LOAD, RESET, LABEL, RESUME]  # the first takes in what is left of a load that failed


def speaking_to(vllm: ScriptedVllm, **options: Any) -> aclosing[ServerEngine]:
    return aclosing(vllm_engine(vllm.url, **options))


async def refit(engine: ServerEngine, target: Target = TARGET) -> Refit:
    return await engine.refit(target, lambda _: None)


async def test_a_good_refit_pauses_loads_empties_caches_sets_the_label_and_resumes() -> None:
    with scripted_vllm() as vllm:
        async with speaking_to(vllm) as engine:
            done = await refit(engine)
            seen = await engine.probe()
    assert (done.outcome, done.resumed, done.reason) == (Outcome.ACK, True, None)
    assert done.fingerprint is not None
    assert done.fingerprint.startswith("vllm:xxh3:")
    assert vllm.changes == GOOD
    assert vllm.loads == ["/root/v7"]
    assert isinstance(seen, Reached)
    assert (seen.model_path, seen.weight_version, seen.startup_path) == ("/root/v7", "7", "/base")


async def test_digests_that_do_not_cover_all_are_backed_by_an_answer_once_it_runs_again() -> None:
    with scripted_vllm(covered=False) as vllm:
        async with speaking_to(vllm) as engine:
            stages: list[Stage] = []
            done = await engine.refit(TARGET, stages.append)
            again = await refit(engine, replace(TARGET, fingerprint=done.fingerprint))
            vllm.on("/v1/completions", vllm.completion(0.1))
            assert await engine.fingerprint(done.fingerprint) == done.fingerprint
    assert stages == [Stage.PAUSE, Stage.LOAD, Stage.VERIFY, Stage.RESUME, Stage.VERIFY]
    assert (done.outcome, again.outcome) == (Outcome.ACK, Outcome.ACK)
    assert done.fingerprint is not None
    assert done.fingerprint.startswith("vllm-answers:xxh3:")


async def test_an_answer_that_a_clean_load_did_not_give_pauses_it_again() -> None:
    with scripted_vllm(covered=False) as vllm:
        async with speaking_to(vllm) as engine:
            clean = await refit(engine)
            vllm.on("/v1/completions", vllm.completion(-1.0))
            done = await refit(engine, replace(TARGET, fingerprint=clean.fingerprint))
    assert (done.outcome, done.resumed) == (Outcome.TAINTED, False)
    assert "clean load" in (done.reason or "")
    assert vllm.paused


@pytest.mark.parametrize("reply", [error(500, DEAD), answer(200, {"choices": []}), hang_up])
async def test_a_load_after_which_no_answer_comes_pauses_it_again(reply: Step) -> None:
    with scripted_vllm(absent=frozenset({"/weight_checker"})) as vllm:
        async with speaking_to(vllm) as engine:
            await engine.probe()
            vllm.on("/v1/completions", vllm.completion(), reply)
            done = await refit(engine)
    assert (done.outcome, done.resumed) == (Outcome.TAINTED, False)
    assert vllm.paused


async def test_an_answer_that_waits_behind_many_requests_says_nothing_of_the_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(contents, "TRIAL_SECONDS", 0.2)
    with scripted_vllm(covered=False) as vllm:
        async with speaking_to(vllm) as engine:
            await engine.probe()
            vllm.on("/v1/completions", vllm.completion(), silence)
            done = await refit(engine)
    assert (done.outcome, done.resumed, done.fingerprint) == (Outcome.ACK, True, None)


async def test_a_load_that_fails_is_followed_by_what_it_served_before_in_the_same_pause() -> None:
    with scripted_vllm() as vllm:
        async with speaking_to(vllm) as engine:
            before = await refit(engine, Target(path="/root/v6", label="6"))
            vllm.on(LOAD, error(500, SHAPE))
            done = await refit(engine)
    assert (done.outcome, done.resumed, done.fingerprint) == (Outcome.NACK, True, before.fingerprint)
    assert "what it served before is back" in (done.reason or "")
    assert vllm.changes == [*GOOD, PAUSE, LOAD, LOAD, LOAD, RESET, LABEL, RESUME]
    assert vllm.loads == ["/root/v6", "/root/v7", "/root/v6", "/root/v6"]
    assert (vllm.label, vllm.paused) == ("6", False)


async def test_an_engine_that_does_not_load_what_it_served_before_either_is_to_be_restarted() -> None:
    with scripted_vllm() as vllm:
        async with speaking_to(vllm) as engine:
            await refit(engine, Target(path="/root/v6", label="6"))
            vllm.on(LOAD, *[error(500, SHAPE)] * 5)
            done = await refit(engine)
    assert (done.outcome, done.resumed) == (Outcome.TAINTED, False)
    assert "restart it" in (done.reason or "")
    assert vllm.paused


async def test_what_is_back_has_to_be_what_it_served_before() -> None:
    with scripted_vllm() as vllm:
        async with speaking_to(vllm) as engine:
            await refit(engine, Target(path="/root/v6", label="6"))
            vllm.on(LOAD, error(500, SHAPE), *[answer(200, {"results": [None]})] * 2)  # which load something else
            vllm.loaded = "/torn"
            done = await refit(engine)
    assert (done.outcome, done.resumed) == (Outcome.TAINTED, False)
    assert vllm.paused


async def test_what_it_served_before_is_not_loaded_again_from_files_that_have_changed_since() -> None:
    checks = [True]

    async def unchanged() -> bool:
        return checks[-1]

    with scripted_vllm() as vllm:
        async with speaking_to(vllm) as engine:
            await refit(engine, Target(path="/root/v6", label="6", unchanged=unchanged))
            vllm.on(LOAD, error(500, SHAPE))
            checks.append(False)
            done = await refit(engine)
    assert (done.outcome, done.resumed) == (Outcome.TAINTED, False)
    assert "no longer those that were checked" in (done.reason or "")
    assert len(vllm.loads) == 2
    assert vllm.paused


async def test_a_load_that_may_still_run_is_waited_for_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_vllm() as vllm:
        async with speaking_to(vllm, load_timeout=1) as engine:
            await engine.probe()
            vllm.on(LOAD, silence)
            late = await refit(engine)
            vllm.on("/weight_info", silence)
            beside = await refit(engine, REPAIR)
            done = await refit(engine, REPAIR)
    assert (late.outcome, late.resumed) == (Outcome.TAINTED, False)
    assert (beside.outcome, beside.resumed) == (Outcome.UNREACHABLE, False)
    assert (done.outcome, done.resumed) == (Outcome.ACK, True)
    assert vllm.changes == [PAUSE, LOAD, *REPAIRED]


async def test_a_refit_that_is_cancelled_in_the_pause_resumes() -> None:
    with scripted_vllm() as vllm:
        async with speaking_to(vllm) as engine:
            await engine.probe()
            begun = asyncio.Event()
            vllm.on("/sleep", silence)
            task = asyncio.create_task(engine.refit(TARGET, lambda _: begun.set()))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    assert vllm.changes[-1] == RESUME
    assert LOAD not in vllm.changes


@pytest.mark.parametrize("route", ["/reset_prefix_cache", LABEL, "/weight_checker"])
async def test_new_weights_with_an_old_cache_an_old_label_or_no_proof_are_not_served(route: str) -> None:
    with scripted_vllm() as vllm:
        async with speaking_to(vllm) as engine:
            await engine.fingerprint()
            vllm.on(route, *[hang_up] * (2 if route == "/weight_checker" else 1))
            done = await refit(engine)
    assert (done.outcome, done.resumed) == (Outcome.TAINTED, False)
    assert RESUME not in vllm.changes


async def test_digests_that_a_clean_load_did_not_give_are_not_believed() -> None:
    with scripted_vllm() as vllm:
        async with speaking_to(vllm) as engine:
            done = await refit(engine, replace(TARGET, fingerprint="vllm:xxh3:0"))
            assert "clean load" in (done.reason or "")
            held = await engine.fingerprint()
            same = await refit(engine, replace(REPAIR, not_fingerprint=held))
    assert (done.outcome, same.outcome) == (Outcome.TAINTED, Outcome.TAINTED)
    assert "have not changed" in (same.reason or "")
    assert vllm.paused


async def test_files_that_changed_while_they_were_read_count_only_where_digests_prove_what_was_read() -> None:
    async def changed() -> bool:
        return False

    with scripted_vllm() as vllm:
        async with speaking_to(vllm) as engine:
            done = await refit(engine, replace(TARGET, unchanged=changed))
            held = await engine.fingerprint()
            proved = await refit(engine, replace(REPAIR, unchanged=changed, fingerprint=held))
    assert (done.outcome, proved.outcome) == (Outcome.TAINTED, Outcome.ACK)
    assert "files changed" in (done.reason or "")


@pytest.mark.parametrize(
    ("asked", "sent"), [("auto", "keep"), ("retract", "keep"), ("wait", "wait"), ("abort", "abort")]
)
async def test_the_setting_says_what_becomes_of_requests_in_flight(asked: str, sent: str) -> None:
    with scripted_vllm() as vllm:
        async with speaking_to(vllm, pause_mode=asked) as engine:
            await refit(engine)
    assert vllm.changes[0] == f"/sleep?level=0&mode={sent}"


async def test_no_answer_goes_on_through_the_same_step_of_another_run() -> None:
    with scripted_vllm() as vllm:
        async with speaking_to(vllm) as engine:
            await refit(engine)
            await refit(engine, replace(TARGET, path="/root/other/v7"))
    assert vllm.changes == [*GOOD, "/sleep?level=0&mode=abort", *GOOD[1:]]


TWO = config(tensor_parallel_size=2)


async def test_several_ranks_with_the_extension_are_sent_no_load_that_the_extension_does_not_carry_out() -> None:
    """Of a folder that others wrote vLLM's own reload would fail on one rank, and the answers would not show it."""
    with scripted_vllm(told=TWO, ranks=2) as vllm:
        async with speaking_to(vllm) as engine:
            engine.plugin.seen = PluginSeen(release="0.1.0")

            async def look(launch: Launch, *, anew: bool = False) -> None: ...

            engine.plugin.look = look
            seen = await engine.probe()
            done = await refit(engine)
    assert isinstance(seen, Reached)
    assert seen.obstacles == ()
    assert (done.outcome, vllm.loads) == (Outcome.NACK, [])
    assert "2 processes hold its weights" in (done.reason or "")


async def test_an_engine_that_sleeps_is_neither_loaded_nor_resumed() -> None:
    told = config()
    told["vllm_config"]["model_config"]["enable_sleep_mode"] = True
    with scripted_vllm(told=told, paused=True) as vllm:
        async with speaking_to(vllm) as engine:
            done = await refit(engine)
            assert (done.outcome, done.resumed) == (Outcome.UNREACHABLE, True)
            assert "/wake_up" in (done.reason or "")
            assert vllm.changes == []
            assert (await refit(engine, REPAIR)).outcome is Outcome.ACK


async def test_an_engine_that_sleeps_is_not_resumed_by_a_refusal_either() -> None:
    told = config(enable_eplb=True)
    told["vllm_config"]["model_config"]["enable_sleep_mode"] = True
    with scripted_vllm(told=told, paused=True) as vllm:
        async with speaking_to(vllm) as engine:
            done = await refit(engine)
            assert (done.outcome, vllm.changes) == (Outcome.UNREACHABLE, [])


async def test_a_draft_model_is_named_and_hinders_no_update() -> None:
    told = config()
    told["vllm_config"]["speculative_config"] = {"method": "eagle", "model": "/draft"}
    with scripted_vllm(told=told) as vllm:
        async with speaking_to(vllm) as engine:
            seen = await engine.probe()
            done = await refit(engine)
    assert isinstance(seen, Reached)
    assert [("draft" in each.text, each.blocks) for each in seen.obstacles] == [(True, False)]
    assert done.outcome is Outcome.ACK


async def test_a_server_without_dev_mode_says_how_to_start_it() -> None:
    dev = {"/weight_info", "/collective_rpc", "/pause", "/resume", "/reset_prefix_cache", "/update_weight_version"}
    with scripted_vllm(absent=frozenset(dev)) as vllm:
        async with speaking_to(vllm) as engine:
            seen = await engine.probe()
            done = await refit(engine)
    assert isinstance(seen, Unreached)
    assert "VLLM_SERVER_DEV_MODE=1" in seen.reason
    assert done.outcome is Outcome.UNREACHABLE


async def test_a_server_that_is_too_old_says_what_it_lacks() -> None:
    with scripted_vllm(version="0.20.0", absent=frozenset({"/weight_info", "/update_weight_version"})) as vllm:
        async with speaking_to(vllm) as engine:
            seen = await engine.probe()
    assert isinstance(seen, Unreached)
    assert "0.20.0 and has no /update_weight_version; refitd needs 0.27.1" in seen.reason


async def test_what_another_process_has_loaded_has_a_label_and_no_path() -> None:
    with scripted_vllm(label="7") as vllm:
        async with speaking_to(vllm) as engine:
            seen = await engine.probe()
    assert isinstance(seen, Reached)
    assert (seen.model_path, seen.weight_version) == (UNNAMED, "7")


async def test_a_restart_is_seen_by_its_label() -> None:
    with scripted_vllm() as vllm:
        async with speaking_to(vllm) as engine:
            await refit(engine)
            vllm.label = "default"
            vllm.told["vllm_config"]["instance_id"] = "another"
            seen = await engine.probe()
    assert isinstance(seen, Reached)
    assert (seen.model_path, seen.process.started) == ("/base", "another")


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (error(500, DEAD), "restart it"),
        (answer(401, {"error": "Unauthorized"}), "--engine-key-file"),
        (page(200), "no vLLM server"),
        (hang_up, "broke off"),
    ],
)
async def test_a_probe_that_fails_says_what_to_do(reply: Step, reason: str) -> None:
    with scripted_vllm() as vllm:
        async with speaking_to(vllm) as engine:
            vllm.on("/weight_info", reply)
            seen = await engine.probe()
    assert isinstance(seen, Unreached)
    assert reason in seen.reason
    assert seen.advice


async def test_a_trial_tells_the_version_that_answers() -> None:
    with scripted_vllm(label="7") as vllm:
        async with speaking_to(vllm) as engine:
            assert await engine.trial("7") is None
            assert "'7'" in (await engine.trial("8") or "")
            vllm.on("/v1/completions", error(500, "Out of range float values are not JSON compliant: nan"))
            assert "nan" in (await engine.trial("7") or "")


async def test_it_says_whether_it_can_be_changed() -> None:
    with scripted_vllm() as vllm:
        async with speaking_to(vllm) as engine:
            checks = [await engine.check_changes()]
            vllm.on("get_supported_tasks", answer(403, {}), answer(404, {}), error(500, DEAD), hang_up, page(200))
            checks += [await engine.check_changes() for _ in range(5)]
    assert checks[0].fault is None
    assert set(vllm.changes) == {"get_supported_tasks"}, "a call that is refused as incomplete leaves a traceback"
    assert all(check.fault and check.advice for check in checks[1:])
    assert "VLLM_SERVER_DEV_MODE=1" in checks[2].advice


async def test_a_paused_engine_is_asked_for_no_answer() -> None:
    with scripted_vllm(covered=False, paused=True) as vllm:
        async with speaking_to(vllm) as engine:
            assert await engine.fingerprint() is None


@pytest.mark.parametrize(
    ("at", "before"), [(LOAD, 0), ("/is_paused", 0), ("/weight_checker", 1), ("/v1/completions", 1)]
)
async def test_a_server_that_another_program_loads_and_labels_after_a_load_is_not_believed(
    at: str, before: int
) -> None:
    """Two services, each with a label of its own: up to the last proof the label is looked at again."""
    with scripted_vllm(covered=at != "/v1/completions") as vllm:

        def works(handler: BaseHTTPRequestHandler) -> None:
            route = "/collective_rpc" if at == LOAD else at
            body = {"method": LOAD, "kwargs": {"weights_path": vllm.loaded}}
            vllm.work(route, handler.path, body)(handler)

        def intrudes(handler: BaseHTTPRequestHandler) -> None:
            vllm.loaded, vllm.label = "/other/v41", "41"
            works(handler)

        async with speaking_to(vllm) as engine:
            await engine.probe()
            vllm.on(at, *[works] * before, intrudes)
            done = await refit(engine)
    assert (done.outcome, done.resumed, done.overwritten) == (Outcome.TAINTED, False, True)
    assert "another program has labelled it '41'" in (done.reason or "")
    assert done.fingerprint is None, "it is of what the other one has loaded"


async def test_a_label_that_is_gone_is_a_restart_and_speaks_against_the_version() -> None:
    with scripted_vllm() as vllm:
        async with speaking_to(vllm) as engine:
            await refit(engine, Target(path="/root/v6", label="6"))
            was, restarted = answer(200, {"weight_version": "6"}), answer(200, {"weight_version": "default"})
            vllm.on("/weight_info", was, restarted)
            done = await refit(engine)
    assert (done.outcome, done.overwritten) == (Outcome.TAINTED, False)
    assert "it was restarted" in (done.reason or "")


async def test_of_two_services_that_label_one_load_both_the_one_whose_label_is_gone_knows_it() -> None:
    """No call sets a label on a condition. The service that does not find its own label loads anew."""
    with scripted_vllm() as vllm:

        def intrudes(handler: BaseHTTPRequestHandler) -> None:
            vllm.loaded, vllm.label = "/other/v41", "41"
            vllm.work(LABEL, handler.path, {"new_version": "7"})(handler)

        async with speaking_to(vllm) as engine, speaking_to(vllm) as other:
            vllm.on(LABEL, intrudes)
            done = await refit(engine)
            seen = await other.probe()
    assert done.outcome is Outcome.ACK
    assert isinstance(seen, Reached)
    known = after_probe(record(serving="o~v41"), seen, Expected(path="/other/v41", label="41"), "o~v41", 0.0)
    assert (known.serving, known.trouble.contests) == (None, 1)
    assert "another writer" in (known.trouble.contest or "")
