"""LoRA adapters on a real SGLang: what answers them is the newest, and the model itself stays as it was."""

from collections.abc import Generator
from pathlib import Path

import httpx
import pytest

from support.adapters import write_adapter
from support.jobs import PATIENCE, PROMPT, Job, running
from support.servers import API_KEY, KIT, SglangServer

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

LORA = ("--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", "8", "--lora-target-modules")


class LoraServer(SglangServer):
    """SGLang with LoRA, whose code pins host memory: a plugin of the kit's keeps it from that on a CPU."""

    def environment(self) -> dict[str, str]:
        return super().environment() | {"PYTHONPATH": str(KIT / "shims/cpu_pin_memory")}


def answer(engine: SglangServer, adapter: str | None) -> list[int]:
    body = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}}
    headers = {"Authorization": f"Bearer {API_KEY}"}
    named = body | ({} if adapter is None else {"lora_path": adapter})
    reply = httpx.post(f"{engine.url}/generate", json=named, headers=headers, timeout=PATIENCE, trust_env=False)
    return reply.raise_for_status().json()["output_ids"]


@pytest.fixture
def job(models: Path, tmp_path: Path) -> Generator[Job]:
    with (
        LoraServer(tmp_path, models / "model_a", *LORA, "q_proj", "v_proj") as engine,
        running(tmp_path, engine, "--lora", "actor") as job,
    ):
        yield job


def test_requests_that_name_the_adapter_get_it_and_others_the_model(models: Path, tmp_path: Path, job: Job) -> None:
    engine = job.engine
    assert isinstance(engine, SglangServer)
    plain = answer(engine, None)
    answers: list[list[int]] = []
    for step in (1, 2):
        job.serve(write_adapter(tmp_path / f"adapter{step}", models / "model_a", step), step)
        answers.append(answer(engine, f"actor-v{step}"))
    assert answers[0] != answers[1]
    assert plain not in answers
    assert answer(engine, None) == plain
