"""What only vLLM does, on one without anything of refitd's inside: the rest is in test_engine_contract.py."""

import asyncio

import pytest

from refitd.engine.fingerprints import ANSWERED
from refitd.engine.port import Outcome
from support.servers import VLLM_VENV
from support.subject import Streamed, ignore_stage
from support.vllm import OneVllm, VllmSubject

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(VLLM_VENV is None, reason="REFITD_VLLM_VENV names no vLLM: make vllm"),
]

TOKENS = 200


@pytest.fixture(scope="session", params=["vllm"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def subject(kind: str, one_vllm: OneVllm) -> VllmSubject:
    return one_vllm.subject(kind)


async def loaded_a(subject: VllmSubject) -> list[int]:
    """Load model_a; return what it answers."""
    a = await subject.refit("model_a", "1", repairs=True)
    assert (a.outcome, a.resumed) == (Outcome.ACK, True), a.reason
    return await subject.answer()


async def test_digests_that_leave_out_what_is_repacked_are_backed_by_an_answer(subject: VllmSubject) -> None:
    done = await subject.refit("model_b", "3", repairs=True)
    assert done.fingerprint is not None
    assert done.fingerprint.startswith(ANSWERED)


async def test_what_a_load_that_failed_has_read_is_in_the_way_of_the_next_one(subject: VllmSubject) -> None:
    """Which is why the adapter believes no load after one that failed, unless another follows."""
    answer = await loaded_a(subject)
    begun = subject.begun_checkpoint()
    await subject.post("/pause?mode=keep")
    assert (await subject.reload(begun)).status_code == 500
    assert (await subject.reload(subject.path("model_a"))).status_code == 500
    refit = await subject.refit("model_a", "1", repairs=True)
    assert refit.outcome is Outcome.ACK, refit.reason
    assert await subject.answer() == answer


async def test_a_pause_that_waits_has_requests_end_first(subject: VllmSubject) -> None:
    await loaded_a(subject)
    begun = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        answer = group.create_task(subject.stream(TOKENS, begun))
        await begun.wait()
        refit = await subject.adapter(pause_mode="wait").refit(subject.target("model_b", "2"), ignore_stage)
    assert refit.outcome is Outcome.ACK, refit.reason
    assert answer.result() == Streamed(TOKENS, "length", None)
