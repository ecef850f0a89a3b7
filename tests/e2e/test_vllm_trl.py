"""The released TRL generates with a real vLLM, and what it learns reaches that vLLM through refitd alone."""

import asyncio
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
import os, sys
root, run, url, token, model_path, out, server, own, client = sys.argv[1:10]
sys.path[:0], sys.path[len(sys.path):] = [client], [own]
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

torch.manual_seed(0)
rows = Dataset.from_list([{"prompt": f"line {n}"} for n in range(20)])
settings = GRPOConfig(
    output_dir=out, max_steps=2, learning_rate=1e-2, per_device_train_batch_size=4, num_generations=4,
    max_completion_length=8, use_cpu=True, bf16=False, report_to="none", save_strategy="no", disable_tqdm=True,
    use_vllm=True, vllm_mode="server", vllm_server_base_url=server,
)
def reward(completions, **_):
    return [float(len(set(text))) for text in completions]
"""
TWO_LINES = """
from refitd_client.trainers.trl import RefitServerCallback
refit = RefitServerCallback(root, run, url, dtype=torch.bfloat16, token=token)
"""
TRAIN = """
trainer = GRPOTrainer(model=model_path, reward_funcs=reward, args=settings, train_dataset=rows, callbacks=[refit])
trainer.train()
print("trained", trainer.state.global_step)
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
        places = [str(vllm_models / "model_a"), str(tmp_path / "out"), server.url]
        words = [str(job.root), RUN, job.refitd.url, TOKEN, *places]
        packages = [sysconfig.get_paths()["purelib"], str(REPOSITORY / "client")]
        command = [str(python), "-c", SCRIPT + TWO_LINES + TRAIN, *words, *packages]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert "trained 2" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
        # Rollouts of a step come from the weights of the step before: those of the second step are never asked for.
        assert sorted(version.step for version in job.client.versions().items) == [0, 1]
        assert asyncio.run(subject.label()) == "1"
    assert asyncio.run(subject.answer()) != before
    log = server.log.read_text(errors="replace")
    assert log.count("POST /v1/completions") >= 4  # two steps' rollouts, and the two answers above
    for route in ("start_weight_update", "update_weights", "init_weight_transfer_engine"):
        assert f"POST /{route}" not in log
