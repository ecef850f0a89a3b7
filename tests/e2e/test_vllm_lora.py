"""LoRA adapters on a real vLLM: what answers them is the newest, late and running requests get what they asked for, and
no adapter that is bad, evicted or unloaded ends the engine."""

import os
import shutil
from collections.abc import Callable, Generator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from refitd.engine.port import Outcome, Refit, Target
from refitd_client import VersionRejectedError
from support.adapters import write_adapter
from support.engines import vllm_adapters
from support.jobs import Job, running
from support.servers import API_KEY
from support.subject import ignore_stage
from support.vllm import VllmServer
from support.vllm_lora import answer, call, names_of

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.timeout(600)]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(vllm_models: Path) -> Path:
    return vllm_models / "model_a"


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[VllmServer]:
    """One for all tests, with as few adapters in memory as vLLM holds unless it is told otherwise: one."""
    with VllmServer(tmp_path_factory.mktemp("lora"), model, "--enable-lora", "--max-lora-rank", "8") as server:
        yield server


@pytest.fixture
def job(engine: Any, tmp_path: Path) -> Generator[Job]:
    with running(tmp_path, engine, "--lora", "actor", "--keep-last", "1") as job:
        yield job
    for name in names_of(engine):
        call(engine, "/v1/unload_lora_adapter", {"lora_name": name}).raise_for_status()


def test_requests_that_name_the_adapter_get_it_and_others_the_model(
    model: Path, tmp_path: Path, engine: VllmServer, job: Job
) -> None:
    plain = answer(engine, None)
    answers: list[list[int]] = []
    for step in (1, 2, 3):
        job.serve(write_adapter(tmp_path / f"adapter{step}", model, step), step)
        answers.append(answer(engine, f"actor-v{step}"))
    assert len({tuple(each) for each in (plain, *answers)}) == 4
    assert answer(engine, None) == plain
    # vLLM holds one adapter in memory, and reads the other that it lists from its folder: that is still there.
    job.client.reclaim()
    assert answer(engine, "actor-v2") == answers[1], "a request that comes late still gets what it was made for"
    assert answer(engine, "actor-v3") == answers[2]
    seen = job.engine_now
    assert (seen.server, seen.server_version) == ("vLLM", "0.32.0")
    assert seen.proof == "answers to a fixed prompt (recorded, not yet compared)"
    with pytest.raises(VersionRejectedError, match="rank 8 want"):
        job.serve(write_adapter(tmp_path / "wrong", model, 4, r=8), 4)
    assert answer(engine, "actor-v3") == answers[2]


def rewritten(folder: Path, change: Callable[[Tensors], None]) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def without_one(tensors: Tensors) -> None:
    del tensors[min(tensors)]


def not_finite(tensors: Tensors) -> None:
    tensors[max(tensors)].fill_(float("nan"))


def torn(folder: Path) -> None:
    os.truncate(folder / "adapter_model.safetensors", 3000)


# What vLLM makes of adapters that the service's validation keeps away from it. A 200 is no proof of anything.
BAD: dict[str, tuple[Callable[[Path], None], Outcome, str]] = {
    "missing": (lambda folder: rewritten(folder, without_one), Outcome.ACK, ""),
    "empty": (lambda folder: rewritten(folder, Tensors.clear), Outcome.NACK, "answered 500"),
    "torn": (torn, Outcome.NACK, "incomplete metadata"),
    "gone": (shutil.rmtree, Outcome.NACK, "No adapter found"),
}


@pytest.mark.parametrize("name", BAD)
async def test_an_adapter_that_is_bad_is_not_listed_and_the_one_before_answers_on(
    name: str, model: Path, tmp_path: Path, engine: VllmServer
) -> None:
    spoil, outcome, reason = BAD[name]
    good, bad = (write_adapter(tmp_path / each, model, step) for step, each in ((6, "good"), (7, "bad")))
    spoil(bad)
    adapters = vllm_adapters(engine.url, name="actor", keep=2, api_key=API_KEY)

    async def refit(folder: Path, label: str) -> Refit:
        return await adapters.refit(Target(path=str(folder), label=label), ignore_stage)

    try:
        assert (await refit(good, "6")).outcome is Outcome.ACK
        before = answer(engine, "actor-v6")
        done = await refit(bad, "7")
        assert (done.outcome, done.resumed) == (outcome, True), done.reason
        assert reason in (done.reason or "")
        assert names_of(engine) == {"actor-v6"} | ({"actor-v7"} if outcome is Outcome.ACK else set())
        assert answer(engine, "actor-v6") == before
    finally:
        await adapters.aclose()
        for listed in names_of(engine):
            call(engine, "/v1/unload_lora_adapter", {"lora_name": listed})


async def test_an_adapter_whose_answers_are_no_numbers_is_unloaded_and_the_engine_is_not_believed(
    model: Path, tmp_path: Path, engine: VllmServer
) -> None:
    """The last test: NaN stays behind in the engine."""
    bad = write_adapter(tmp_path / "bad", model, 7)
    rewritten(bad, not_finite)
    async with aclosing(vllm_adapters(engine.url, name="actor", api_key=API_KEY)) as adapters:
        done = await adapters.refit(Target(path=str(bad), label="7"), ignore_stage)
    assert (done.outcome, names_of(engine)) == (Outcome.TAINTED, set())
    assert "Out of range float values" in (done.reason or "")
