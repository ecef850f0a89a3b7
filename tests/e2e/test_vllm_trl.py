"""The released TRL generates with a real vLLM, and what it learns reaches that vLLM through refitd alone."""

import asyncio
import os
import subprocess
import sysconfig
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.jobs import RUN, TOKEN, running
from support.vllm import REPOSITORY, VLLM_VENV, VllmServer, VllmSubject

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.timeout(300)]

# TRL imports vLLM wherever it is asked to generate with one, so it runs in vLLM's environment. What is missing there
# (TRL itself, accelerate, datasets) is found in the tests' own, which comes last.
SCRIPT = """
import runpy, sys
example, client, own, *sys.argv[1:] = sys.argv[1:]
sys.path[:0], sys.path[len(sys.path):] = [client], [own]
runpy.run_path(example, run_name="__main__")
"""


class OpenVllm(VllmServer):
    """A vLLM without an API key: TRL's client sends none."""

    def command(self, port: int) -> Sequence[str]:
        words = list(super().command(port))
        place = words.index("--api-key")
        return [*words[:place], *words[place + 2 :], "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]


@pytest.fixture
def server(vllm_models: Path, tmp_path: Path) -> Generator[VllmServer]:
    (tmp_path / "vllm").mkdir()
    with OpenVllm(tmp_path / "vllm", vllm_models / "model_a") as server:
        yield server


def test_grpo_learns_from_the_rollouts_of_a_vllm_that_refitd_updates(
    server: Any, vllm_models: Path, tmp_path: Path
) -> None:
    subject = VllmSubject(server, vllm_models)
    before = asyncio.run(subject.answer())
    with running(tmp_path, server) as job:
        python = Path(VLLM_VENV or "").absolute() / "bin/python"
        packages = [str(REPOSITORY / "client"), sysconfig.get_paths()["purelib"]]
        words = [str(job.root), RUN, job.refitd.url, str(vllm_models / "model_a"), server.url, str(tmp_path / "out")]
        command = [str(python), "-c", SCRIPT, str(REPOSITORY / "examples/trl/grpo_vllm.py"), *packages, *words]
        own = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "REFITD_TOKEN": TOKEN}
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=os.environ | own)
        assert "trained 2" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
        # Rollouts of a step come from the weights of the step before: those of the second step are never asked for.
        assert sorted(version.step for version in job.client.versions().items) == [0, 1]
        assert asyncio.run(subject.label()) == "1"
    assert asyncio.run(subject.answer()) != before
    log = server.log.read_text(errors="replace")
    assert log.count("POST /v1/completions") >= 4  # two steps' rollouts, and the two answers above
    for route in ("start_weight_update", "update_weights", "init_weight_transfer_engine"):
        assert f"POST /{route}" not in log
