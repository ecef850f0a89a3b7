"""What the rollout relies on, held against a real vLLM without anything of refitd's inside, on the CPU.

The bad checkpoints are those of tests/sglang/README.md. vLLM answers 200 to half of them, and a request after one of
the others ends it. No adapter can tell all of them from a good load: the service's validation keeps them away.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Generator
from pathlib import Path

import httpx
import pytest

from refitd.engine.port import Outcome, Reached, Refit, Stage, Unreached
from refitd.engine.vllm.contents import ANSWERED, agree
from support.servers import KIT as SGLANG_KIT
from support.servers import VLLM_VENV
from support.subject import ignore_stage
from support.vllm import PROMPT, WIDTH, VllmServer, VllmSubject

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(VLLM_VENV is None, reason="REFITD_VLLM_VENV names no vLLM: make vllm"),
]

TOKENS = 200
REQUESTS = 3
ENDED = ["bad_empty", "bad_extra", "bad_garbage", "bad_shape_norm", "bad_shard2_gone", "bad_shard2_trunc", "bad_trunc"]
MIXED = ["bad_missing", "b_only_lm_head"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm-models")
    for script in (["make-models", str(folder), str(WIDTH)], ["make-bad", str(folder)]):
        subprocess.run([sys.executable, str(SGLANG_KIT / script[0]), *script[1:]], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[VllmServer]:
    """One vLLM on model_a for all tests, because it takes 40 seconds to start. A test that kills it restarts it."""
    with VllmServer(tmp_path_factory.mktemp("vllm"), models / "model_a") as server:
        yield server


@pytest.fixture
async def subject(server: VllmServer, models: Path) -> AsyncIterator[VllmSubject]:
    if not server.is_running:
        server.restart()
    subject = VllmSubject(server, models)
    yield subject
    await subject.engine.aclose()


async def loaded_a(subject: VllmSubject) -> tuple[Refit, list[int]]:
    """Load model_a; return how that ended, and what it answers."""
    a = await subject.refit("model_a", "1", repairs=True)
    assert (a.outcome, a.resumed) == (Outcome.ACK, True), a.reason
    return a, await subject.answer()


async def test_a_probe_tells_what_is_served_how_the_server_was_started_and_what_it_can_do(subject: VllmSubject) -> None:
    await subject.refit("model_b", "3", repairs=True)
    seen = await subject.engine.probe()
    assert isinstance(seen, Reached)
    assert (seen.model_path, seen.weight_version) == (str(subject.path("model_b")), "3")
    assert seen.startup_path == str(subject.path("model_a"))
    assert seen.server_version == "0.32.0"
    assert seen.configuration == "vllm 0.32.0 cpu bfloat16 unquantized tp1 pp1 dp1 ep0"
    assert seen.address == f"localhost:{subject.server.port}"
    assert seen.process.started is not None
    other = await subject.adapter().probe()
    assert isinstance(other, Reached)
    assert other.process == seen.process
    # vLLM tells no path: an adapter that has not loaded it knows the label alone.
    assert (other.model_path, other.weight_version) == ("(not named)", "3")


async def test_from_a_to_b_and_back_gives_the_same_answers_and_contents_as_before(subject: VllmSubject) -> None:
    first, answer = await loaded_a(subject)
    assert first.fingerprint is not None
    assert first.fingerprint.startswith(ANSWERED)  # on the CPU its digests do not cover what is repacked
    other = await subject.refit("model_b", "2", not_fingerprint=first.fingerprint)
    assert (other.outcome, other.resumed, other.reason) == (Outcome.ACK, True, None)
    assert other.fingerprint is not None
    assert agree(first.fingerprint, other.fingerprint) is False
    assert await subject.answer() != answer
    back = await subject.refit("model_a", "3", fingerprint=first.fingerprint, not_fingerprint=other.fingerprint)
    assert (back.outcome, back.resumed) == (Outcome.ACK, True)
    assert await subject.engine.fingerprint(first.fingerprint) == first.fingerprint
    assert (await subject.answer(), await subject.label()) == (answer, "3")


async def test_an_update_gives_the_answers_of_a_server_that_was_started_on_that_checkpoint(
    subject: VllmSubject, tmp_path: Path
) -> None:
    await loaded_a(subject)
    assert (await subject.refit("model_b", "2")).outcome is Outcome.ACK
    updated = await subject.answer()
    sharded = await subject.refit("b_sharded", "3")
    assert sharded.outcome is Outcome.ACK
    assert await subject.answer() == updated
    subject.server.stop()  # one at a time: each takes 3 GB
    with VllmServer(tmp_path, subject.path("model_b")) as started:
        assert await VllmSubject(started, subject.models).answer() == updated


async def test_stages_come_in_order_and_are_timed(subject: VllmSubject) -> None:
    await loaded_a(subject)
    stages: list[Stage] = []
    refit = await subject.engine.refit(subject.target("model_a", "5"), stages.append)
    # Its digests do not cover all, so that it is asked once it runs again.
    assert stages == [Stage.PAUSE, Stage.LOAD, Stage.VERIFY, Stage.RESUME, Stage.VERIFY]
    assert refit.timings.keys() == {stage.value for stage in stages}


@pytest.mark.parametrize("model", [*ENDED, "nowhere"])
async def test_a_load_that_fails_is_undone_within_the_same_pause(subject: VllmSubject, model: str) -> None:
    a, answer = await loaded_a(subject)
    refit = await subject.refit(model, "2", not_fingerprint=a.fingerprint)
    assert (refit.outcome, refit.resumed) == (Outcome.NACK, True), refit.reason
    assert "what it served before is back" in (refit.reason or "")
    assert (await subject.answer(), await subject.label()) == (answer, "1")
    assert (await subject.refit("model_b", "3")).outcome is Outcome.ACK


async def test_what_a_load_that_failed_has_read_is_in_the_way_of_the_next_one(subject: VllmSubject) -> None:
    """Which is why the adapter believes no load after one that failed, unless another follows."""
    _, answer = await loaded_a(subject)
    begun = subject.begun_checkpoint()
    await subject.post("/pause?mode=keep")
    assert (await subject.reload(begun)).status_code == 500
    assert (await subject.reload(subject.path("model_a"))).status_code == 500
    refit = await subject.refit("model_a", "1", repairs=True)
    assert refit.outcome is Outcome.ACK, refit.reason
    assert await subject.answer() == answer


@pytest.mark.parametrize("model", MIXED)
async def test_a_mixture_of_two_models_looks_like_a_success_unless_a_clean_load_is_on_record(
    subject: VllmSubject, model: str
) -> None:
    clean = await subject.refit("model_b", "0", repairs=True)
    a, answer = await loaded_a(subject)
    refit = await subject.refit(model, "2", not_fingerprint=a.fingerprint)
    assert refit.outcome is Outcome.ACK
    assert await subject.answer() != answer
    await subject.refit("model_a", "1")
    known = await subject.refit(model, "3", fingerprint=clean.fingerprint)
    assert (known.outcome, known.resumed) == (Outcome.TAINTED, False)
    assert "clean load" in (known.reason or "")
    with pytest.raises(httpx.TimeoutException):
        await subject.answer(within=1.0)
    repaired = await subject.refit("model_a", "4", fingerprint=a.fingerprint, repairs=True)
    assert (repaired.outcome, repaired.resumed) == (Outcome.ACK, True), repaired.reason
    assert await subject.answer() == answer


async def test_weights_that_are_not_numbers_are_found_by_the_answer(subject: VllmSubject) -> None:
    _, answer = await loaded_a(subject)
    refit = await subject.refit("bad_nan", "2")
    assert (refit.outcome, refit.resumed) == (Outcome.TAINTED, False)
    assert "trial" in (refit.reason or "")
    assert (await subject.refit("model_a", "3", repairs=True)).outcome is Outcome.ACK
    assert await subject.answer() == answer


async def test_an_engine_that_no_load_brings_back_says_restart_it_and_comes_back_on_its_startup_weights(
    subject: VllmSubject,
) -> None:
    """On the CPU it has repacked its linear layers, and one of another shape leaves it nothing to load into."""
    before = await subject.engine.probe()
    _, answer = await loaded_a(subject)
    refit = await subject.refit("bad_shape", "2")
    assert (refit.outcome, refit.resumed) == (Outcome.TAINTED, False)
    assert "restart it" in (refit.reason or "")
    repair = await subject.refit("model_a", "3", repairs=True)
    assert (repair.outcome, repair.resumed) == (Outcome.TAINTED, False)
    assert "restart it" in (repair.reason or "")
    subject.server.restart()
    seen = await subject.engine.probe()
    assert isinstance(before, Reached)
    assert isinstance(seen, Reached)
    assert (seen.model_path, seen.weight_version) == (str(subject.path("model_a")), "default")
    assert seen.configuration == before.configuration
    assert seen.process.is_as(before.process) is False
    assert await subject.answer() == answer


@pytest.mark.parametrize("mode", ["auto", "wait"])
async def test_requests_in_flight_are_all_answered_in_full_when_weights_change_under_them(
    subject: VllmSubject, mode: str
) -> None:
    await loaded_a(subject)
    engine = subject.adapter(pause_mode=mode)
    async with subject.http() as http, asyncio.TaskGroup() as group:
        begun = [asyncio.Event() for _ in range(REQUESTS)]
        answers = [group.create_task(_stream(http, event)) for event in begun]
        await asyncio.gather(*(event.wait() for event in begun))
        refit = await engine.refit(subject.target("model_b", "2"), ignore_stage)
        assert refit.outcome is Outcome.ACK, refit.reason
        assert mode == "wait" or not all(answer.done() for answer in answers)
    assert [answer.result() for answer in answers] == [(TOKENS, "length")] * REQUESTS


async def _stream(http: httpx.AsyncClient, begun: asyncio.Event) -> tuple[int, str | None]:
    """Ask for a long answer; say when it has begun; return how many tokens came, and why it ended."""
    body = {
        "prompt": PROMPT,
        "temperature": 0,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    tokens, reason = 0, None
    async with http.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                tokens += len(choice["token_ids"] or [])
                reason = choice["finish_reason"] or reason
                begun.set()
    return tokens, reason


async def test_an_engine_with_unknown_contents_is_not_resumed_by_a_repair_that_it_refuses(subject: VllmSubject) -> None:
    _, answer = await loaded_a(subject)
    refused = await subject.refit("nowhere", "3", repairs=True)
    assert (refused.outcome, refused.resumed) == (Outcome.TAINTED, False)
    with pytest.raises(httpx.TimeoutException):
        await subject.answer(within=1.0)
    assert (await subject.refit("model_a", "3", repairs=True)).outcome is Outcome.ACK
    assert await subject.answer() == answer


async def test_a_trial_passes_on_a_good_model_and_tells_the_label_that_answers(subject: VllmSubject) -> None:
    await subject.refit("model_b", "7", repairs=True)
    assert await subject.engine.trial("7") is None
    assert "'7'" in (await subject.engine.trial("8") or "")


async def test_resume_is_harmless_on_an_engine_that_is_not_paused(subject: VllmSubject) -> None:
    await loaded_a(subject)
    assert await subject.engine.resume()
    assert await subject.engine.resume()
    assert await subject.answer()


async def test_a_load_that_outlasts_the_time_out_taints_and_the_next_refit_waits_for_its_end(
    subject: VllmSubject,
) -> None:
    _, answer = await loaded_a(subject)
    hurried = subject.adapter(load_timeout=3.0)
    await hurried.probe()
    await hurried.fingerprint()
    frozen = subject.server.frozen()

    def on_stage(stage: Stage) -> None:
        if stage is Stage.LOAD:
            frozen.__enter__()

    late = await hurried.refit(subject.target("model_b", "2", not_fingerprint="vllm:-"), on_stage)
    assert (late.outcome, late.resumed) == (Outcome.TAINTED, False)
    assert "did not answer within 3 s" in (late.reason or "")
    beside = await hurried.refit(subject.target("model_a", "3", repairs=True), ignore_stage)
    assert (beside.outcome, beside.resumed) == (Outcome.UNREACHABLE, False)
    assert "may still be running" in (beside.reason or "")
    frozen.__exit__(None, None, None)
    while (repaired := await hurried.refit(subject.target("model_a", "3", repairs=True), ignore_stage)).outcome is (
        Outcome.UNREACHABLE
    ):
        pass
    assert (repaired.outcome, repaired.resumed) == (Outcome.ACK, True), repaired.reason
    assert (await subject.answer(), await subject.label()) == (answer, "3")


async def test_a_server_without_its_routes_for_weights_is_not_reached_and_the_variable_is_named(
    subject: VllmSubject, tmp_path: Path
) -> None:
    subject.server.stop()  # one at a time
    with VllmServer(tmp_path, subject.path("model_a"), DEV_MODE="0") as plain:
        seen = await VllmSubject(plain, subject.models).engine.probe()
    assert isinstance(seen, Unreached)
    assert "VLLM_SERVER_DEV_MODE=1" in seen.reason


async def test_several_ranks_are_updated_where_that_is_allowed_and_believed_no_more_after_one_failure(
    subject: VllmSubject, tmp_path: Path
) -> None:
    subject.server.stop()  # one at a time
    with VllmServer(tmp_path, subject.path("model_a"), "--tensor-parallel-size", "2", BIND="0|1") as server:
        two = VllmSubject(server, subject.models)
        refused = await two.refit("model_b", "2")
        assert (refused.outcome, refused.resumed) == (Outcome.NACK, True), refused.reason
        assert "--vllm-stock-ranks" in (refused.reason or "")
        answer = await two.answer()
        two.engine = two.adapter(several_ranks=True)
        seen = await two.engine.probe()
        assert isinstance(seen, Reached)
        assert "tp2" in seen.configuration
        done = await two.refit("model_b", "2")
        assert (done.outcome, done.resumed) == (Outcome.ACK, True), done.reason
        assert await two.answer() != answer
        failed = await two.refit("nowhere", "3")
        assert (failed.outcome, failed.resumed) == (Outcome.TAINTED, False)
        again = await two.refit("model_a", "4", repairs=True)
        assert (again.outcome, again.resumed) == (Outcome.TAINTED, False)
        assert "restart it" in (again.reason or "")
        # An adapter that has seen none of this finds out by the answer that it knows.
        other = await two.adapter(several_ranks=True).refit(two.target("model_a", "4", repairs=True), ignore_stage)
        assert (other.outcome, other.resumed) == (Outcome.TAINTED, False)
        assert "restart it" in (other.reason or "")
