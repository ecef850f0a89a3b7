"""LoRA adapters on a real vLLM with two ranks, stock and with refitd inside, where the plugin stands aside."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from support.adapters import write_adapter
from support.jobs import running
from support.vllm import STARTED, PluggedVllm, VllmServer
from support.vllm_lora import answer

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
