"""LoRA adapters on a real vLLM with two ranks, stock and with refitd inside, where the plugin stands aside."""

import shutil
from collections.abc import Generator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from refitd.engine.port import Outcome, Reached, Refit, Target
from refitd.engine.vllm import VllmAdapters
from support.adapters import write_adapter
from support.engines import vllm_adapters
from support.jobs import running
from support.servers import API_KEY
from support.subject import ignore_stage
from support.vllm import STARTED, PluggedVllm, VllmServer
from support.vllm_lora import answer, call, names_of

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.timeout(600)]

LORA = ("--enable-lora", "--max-lora-rank", "8", "--max-cpu-loras", "3")


@pytest.fixture(scope="module")
def model(vllm_models: Path) -> Path:
    return vllm_models / "model_a"


@pytest.fixture(scope="module", params=["stock", "plugged"])
def engine(
    model: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Generator[VllmServer]:
    folder = tmp_path_factory.mktemp("ranks")
    flags, variables = STARTED["vllm-two-ranks"]
    if request.param == "stock":
        server = VllmServer(folder, model, *flags, *LORA, **variables)
    else:
        server = PluggedVllm(folder, model, *flags, *LORA, root=folder, **variables)
    with server:
        yield server


def test_adapters_are_loaded_and_unloaded_on_every_rank_by_the_service(
    model: Path, tmp_path: Path, engine: Any
) -> None:
    plain = answer(engine, None)
    answers: list[list[int]] = []
    with running(tmp_path, engine, "--lora", "actor:1") as job:
        for step in (1, 2):
            job.serve(write_adapter(tmp_path / f"adapter{step}", model, step), step)
            answers.append(answer(engine, f"actor-v{step}"))
    assert len({tuple(each) for each in (plain, *answers)}) == 3
    assert answer(engine, None) == plain
    assert answer(engine, "actor-v2") == answers[1]


async def test_an_adapter_is_replaced_on_every_rank_and_after_one_failure_nothing_counts(
    model: Path, tmp_path: Path, engine: VllmServer
) -> None:
    """The last test: after a load that failed the ranks answer other calls than they are asked."""
    first, again, bad = (write_adapter(tmp_path / str(step), model, step) for step in (3, 4, 5))
    shutil.rmtree(bad)
    async with AsyncExitStack() as opened:

        def adapters() -> VllmAdapters:
            made = vllm_adapters(engine.url, name="actor", api_key=API_KEY)
            opened.push_async_callback(made.aclose)
            return made

        async def refit(by: VllmAdapters, folder: Path, label: str) -> Refit:
            return await by.refit(Target(path=str(folder), label=label), ignore_stage)

        willing = adapters()
        one = await refit(willing, first, "3")
        before = answer(engine, "actor-v3")
        two = await refit(willing, again, "3")
        assert (one.outcome, two.outcome) == (Outcome.ACK, Outcome.ACK), (one.reason, two.reason)
        assert answer(engine, "actor-v3") != before
        assert one.fingerprint != two.fingerprint
        for name in names_of(engine):
            call(engine, "/v1/unload_lora_adapter", {"lora_name": name}).raise_for_status()
        assert names_of(engine) == set()
        lost = await refit(willing, bad, "5")
        assert (lost.outcome, "restart it" in (lost.reason or "")) == (Outcome.TAINTED, True)
        assert (await refit(willing, again, "6")).outcome is Outcome.TAINTED
        assert isinstance(await willing.probe(), Reached)
