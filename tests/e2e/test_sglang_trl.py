"""The released TRL generates with a real SGLang, which refitd brings to each step."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.jobs import RUN, TOKEN, running, served_by
from support.servers import API_KEY, SglangServer
from support.trainers import EXAMPLES

pytestmark = [pytest.mark.sglang, pytest.mark.e2e, pytest.mark.timeout(400)]


def test_grpo_learns_from_the_rollouts_of_an_sglang_that_refitd_updates(
    sglang: SglangServer, models: Path, tmp_path: Path
) -> None:
    if not sglang.is_running:
        sglang.restart()
    with running(tmp_path, sglang) as job:
        words = [EXAMPLES / "trl/grpo_sglang.py", job.root, RUN, job.refitd.url, models / "model_a", tmp_path / "out"]
        own = {"REFITD_TOKEN": TOKEN, "ENGINE_KEY": API_KEY, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | own)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        assert "trained 3, rollouts came from steps 0 1 2\n" in done.stdout
        assert sorted(version.step for version in job.client.versions().items) == [0, 1, 2, 3]
        assert served_by(sglang).label == "3"
