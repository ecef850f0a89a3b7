"""The released AReaL's own broadcasts (`weight_update_mode: xccl`), and the front of a real vLLM: not an imitation."""

import asyncio
from pathlib import Path

import pytest

from support.areal_broadcasts import broadcasts_are_served_and_a_killed_trainer_changes_nothing
from support.jobs import running
from support.servers import AREAL_VENV
from support.vllm import OneVllm, VllmSubject

pytestmark = [
    *(pytest.mark.vllm, pytest.mark.areal, pytest.mark.e2e, pytest.mark.timeout(600)),
    pytest.mark.skipif(not AREAL_VENV, reason="REFITD_AREAL_VENV names no AReaL: make areal"),
]


@pytest.fixture(scope="session", params=["vllm"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def test_a_real_vllm_serves_what_the_released_areal_broadcasts_and_goes_on_when_its_trainer_dies_in_the_middle(
    kind: str, one_vllm: OneVllm, vllm_models: Path, tmp_path: Path
) -> None:
    subject = VllmSubject(one_vllm.of(kind), vllm_models)
    pair = [vllm_models / name for name in ("model_a", "model_b")]
    with running(tmp_path, subject.server) as job:
        broadcasts_are_served_and_a_killed_trainer_changes_nothing(
            "vllm", job, pair, tmp_path, lambda: asyncio.run(subject.answer())
        )
