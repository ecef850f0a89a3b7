"""What is left when an update of a real vLLM breaks off: a rank refuses, hangs or dies, the client goes away, there are
two services. Nothing mixed is served, and what is left paused says what to do."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from refitd.engine.plugin import Leads
from refitd.engine.port import Outcome, Reached, Stage, Unreached
from refitd_client.contract.plugin import Owner
from support.servers import VLLM_VENV
from support.subject import ignore_stage
from support.vllm import OneVllm, PluggedVllm, VllmServer, VllmSubject

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(VLLM_VENV is None, reason="REFITD_VLLM_VENV names no vLLM: make vllm"),
]

ALL = ["vllm", "vllm-plugged", "vllm-plugged-two-ranks"]
PLUGGED = ["vllm-plugged", "vllm-plugged-two-ranks"]
TWO_PLUGGED = ["vllm-plugged-two-ranks"]


@pytest.fixture(scope="session")
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def of_kinds(kinds: list[Any]) -> pytest.MarkDecorator:
    """The tests that are for these kinds."""
    return pytest.mark.parametrize("kind", kinds, indirect=True, scope="session")


@pytest.fixture
def subject(kind: str, one_vllm: OneVllm) -> VllmSubject:
    return one_vllm.subject(kind)


def server_of(subject: VllmSubject) -> VllmServer:
    assert isinstance(subject.server, VllmServer)
    return subject.server


async def loaded_a(subject: VllmSubject) -> list[int]:
    """Load model_a; return what it answers."""
    a = await subject.refit("model_a", "1", repairs=True)
    assert (a.outcome, a.resumed) == (Outcome.ACK, True), a.reason
    return await subject.answer()


async def assert_silent_until_repaired(subject: VllmSubject, answer: list[int]) -> None:
    """It answers nothing, until a service that has seen nothing of this loads what it is to serve."""
    with pytest.raises(httpx.TimeoutException):
        await subject.answer(within=1.0)
    fresh = subject.adapter()
    repaired = await fresh.refit(subject.target("model_a", "4", repairs=True), ignore_stage)
    while repaired.outcome is Outcome.UNREACHABLE:  # the load of before still runs
        repaired = await fresh.refit(subject.target("model_a", "4", repairs=True), ignore_stage)
    await fresh.aclose()
    assert (repaired.outcome, repaired.resumed) == (Outcome.ACK, True), repaired.reason
    assert await subject.answer() == answer


@of_kinds(TWO_PLUGGED)
async def test_a_rank_that_alone_refuses_leaves_every_rank_as_it_was(subject: VllmSubject) -> None:
    answer = await loaded_a(subject)
    assert isinstance(subject.server, PluggedVllm)
    subject.server.refuse(rank=1)
    refused = await subject.refit("model_b", "2")
    assert (refused.outcome, refused.resumed) == (Outcome.NACK, True), refused.reason
    assert "rank 1: a fault of the test" in (refused.reason or "")
    assert (await subject.answer(), (await subject.named())[1]) == (answer, "1")
    assert (await subject.refit("model_b", "3")).outcome is Outcome.ACK
    assert await subject.answer() != answer


@of_kinds(TWO_PLUGGED)
async def test_a_rank_that_alone_hangs_leaves_nothing_that_answers(subject: VllmSubject) -> None:
    answer = await loaded_a(subject)
    hurried = subject.adapter(load_timeout=3.0)
    await hurried.probe()
    frozen = server_of(subject).frozen(all_of_them=False)
    late = await hurried.refit(
        subject.target("model_b", "2"), lambda stage: frozen.__enter__() if stage is Stage.LOAD else None
    )
    await hurried.aclose()
    frozen.__exit__(None, None, None)
    assert (late.outcome, late.resumed) == (Outcome.TAINTED, False)
    assert "did not answer within 3 s" in (late.reason or "")
    await assert_silent_until_repaired(subject, answer)


@of_kinds([*TWO_PLUGGED, pytest.param("vllm", marks=pytest.mark.thorough)])
async def test_an_engine_whose_rank_dies_in_mid_load_counts_as_gone_and_takes_updates_once_it_was_started_again(
    subject: VllmSubject,
) -> None:
    """With two ranks vLLM does not answer the load, and its server hangs on without taking connections."""
    answer = await loaded_a(subject)
    server = server_of(subject)
    worker = server.workers[-1]

    def on_stage(stage: Stage) -> None:
        if stage is Stage.LOAD and worker.is_running():  # a stock server is told to load what it served before as well
            worker.kill()

    died = await subject.engine.refit(subject.target("model_b", "2"), on_stage)
    assert (died.outcome, died.resumed) == (Outcome.TAINTED, False)
    seen = await subject.engine.probe()
    while isinstance(seen, Unreached) and "start it" not in seen.advice:  # its server is about to end
        seen = await subject.engine.probe()
    assert isinstance(seen, Unreached)
    server.restart()
    back = await subject.engine.probe()
    assert isinstance(back, Reached)
    assert (back.model_path, back.weight_version) == (str(subject.models / "model_a"), "default")
    assert await subject.answer() == answer
    assert (await subject.refit("model_b", "3", repairs=True)).outcome is Outcome.ACK
    assert await subject.answer() != answer


@of_kinds(ALL)
async def test_a_client_that_goes_away_in_mid_load_leaves_an_engine_that_the_next_one_repairs(
    subject: VllmSubject,
) -> None:
    answer = await loaded_a(subject)
    loading, frozen = asyncio.Event(), server_of(subject).frozen()

    def on_stage(stage: Stage) -> None:
        if stage is Stage.LOAD:
            frozen.__enter__()
            loading.set()

    gone = asyncio.create_task(subject.engine.refit(subject.target("model_b", "2"), on_stage))
    await loading.wait()
    await asyncio.wait({gone}, timeout=0.1)  # so that the load is on its way
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    frozen.__exit__(None, None, None)
    await assert_silent_until_repaired(subject, answer)


@of_kinds(PLUGGED)
async def test_of_two_services_the_engine_names_to_the_second_the_one_that_leads(
    subject: VllmSubject, tmp_path: Path
) -> None:
    await loaded_a(subject)
    leads = [
        Leads(
            owner=Owner(service=str(number) * 32, root=str(tmp_path / str(number)), host="here", pid=number),
            lasts=lambda: 5,
        )
        for number in (1, 2)
    ]
    first, second, ending = (subject.adapter(leads=each) for each in (*leads, replace(leads[0], lasts=lambda: 0.001)))
    try:
        seen, other = await first.probe(), await second.probe()
        await ending.probe()  # the next test finds an engine that no service leads
    finally:
        for each in (first, second, ending):
            await each.aclose()
    assert isinstance(seen, Reached)
    assert isinstance(other, Reached)
    assert seen.led_by is None
    assert str(tmp_path / "1") in (other.led_by or "")


@of_kinds(["vllm"])
async def test_of_two_services_each_sees_that_the_other_has_loaded_something(subject: VllmSubject) -> None:
    answer = await loaded_a(subject)
    other = subject.adapter()
    assert (await other.refit(subject.target("model_b", "9"), ignore_stage)).outcome is Outcome.ACK
    await other.aclose()
    assert await subject.named() == ("(not named)", "9")
    assert await subject.answer() != answer
