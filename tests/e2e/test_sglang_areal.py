"""The released AReaL's own broadcasts (`weight_update_mode: xccl`), and the front of a real SGLang: no imitation."""

from pathlib import Path

import pytest

from support.areal_broadcasts import broadcasts_are_served_and_a_killed_trainer_changes_nothing
from support.jobs import running, served_by
from support.servers import AREAL_VENV, SglangServer

pytestmark = [
    *(pytest.mark.sglang, pytest.mark.areal, pytest.mark.e2e, pytest.mark.timeout(600)),
    pytest.mark.skipif(not AREAL_VENV, reason="REFITD_AREAL_VENV names no AReaL: make areal"),
]


def test_a_real_sglang_serves_what_the_released_areal_broadcasts_and_goes_on_when_its_trainer_dies_in_the_middle(
    sglang: SglangServer, models: Path, tmp_path: Path
) -> None:
    if not sglang.is_running:
        sglang.restart()
    pair = [models / name for name in ("model_a", "model_b")]
    with running(tmp_path, sglang) as job:
        broadcasts_are_served_and_a_killed_trainer_changes_nothing(
            "sglang", job, pair, tmp_path, lambda: served_by(sglang).answer
        )
