"""The released TRL generates with a real vLLM, and what it learns reaches that vLLM through refitd alone."""

import asyncio
import os
import subprocess
from collections.abc import Generator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support.front import NCCL_STAND_IN, GroupFront
from support.jobs import RUN, TOKEN, running
from support.vllm import REPOSITORY, VLLM_VENV, VllmServer, VllmSubject

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.timeout(300)]

# TRL imports vLLM wherever it is asked to generate with one, so it runs in vLLM's environment. What is missing there
# (TRL itself, accelerate, datasets) is found in the tests' own, which comes last.
SCRIPT = """
import runpy, sys
example, client, own, *sys.argv[1:] = sys.argv[1:]
sys.path[:0], sys.path[len(sys.path):] = [client], [own]
{before}
runpy.run_path(example, run_name="__main__")
"""
# TRL refuses to broadcast from a CPU. With Gloo in NCCL's place it need not, so it hears of a GPU here.
ON_A_GPU = """
from trl.generation.vllm_client import VLLMClient
joined = VLLMClient.init_communicator
VLLMClient.init_communicator = lambda self, device: joined(self, "cuda")
"""


class OpenVllm(VllmServer):
    """A vLLM as TRL says to start it, without an API key: TRL's client sends none."""

    def command(self, port: int) -> Sequence[str]:
        words = list(super().command(port))
        place = words.index("--api-key")
        trls = ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
        transfers = ["--weight-transfer-config", '{"backend": "nccl"}']
        return [*words[:place], *words[place + 2 :], *trls, *transfers]


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
        words = [str(job.root), RUN, job.refitd.url, str(vllm_models / "model_a"), server.url, str(tmp_path / "out")]
        trained(tmp_path, "", "grpo_vllm.py", *words)
        # Rollouts of a step come from the weights of the step before: those of the second step are never asked for.
        assert sorted(version.step for version in job.client.versions().items) == [0, 1]
        assert asyncio.run(subject.label()) == "1"
    assert asyncio.run(subject.answer()) != before
    only_refitd_wrote(server)


def test_an_unchanged_grpo_of_trl_that_is_given_the_fronts_url_updates_its_vllm_through_refitd(
    server: Any, vllm_models: Path, tmp_path: Path
) -> None:
    subject = VllmSubject(server, vllm_models)
    with running(tmp_path, server) as job:
        job.serve(vllm_models / "model_a", 0)
        before = asyncio.run(subject.answer())
        with GroupFront(tmp_path, job, has_keys=False) as front:
            words = [str(vllm_models / "model_a"), front.url, str(tmp_path / "out")]
            trained(tmp_path, ON_A_GPU, "grpo_front.py", *words, PYTHONPATH=str(NCCL_STAND_IN))
        assert sorted(version.step for version in job.client.versions().items) == [0, 1, 2]
        assert asyncio.run(subject.label()) == "2"
        learned = asyncio.run(subject.answer())
        assert learned != before
    only_refitd_wrote(server)


def trained(folder: Path, before: str, example: str, *words: str, **variables: str) -> None:
    """Run an example of TRL's, which trains two steps; `before` is Python that goes before it."""
    python = Path(VLLM_VENV or "").absolute() / "bin/python"
    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    packages = [str(REPOSITORY / "client"), str(Path(spec.origin).parents[1])]
    command = [
        str(python),
        "-c",
        SCRIPT.format(before=before),
        str(REPOSITORY / "examples/trl" / example),
        *packages,
        *words,
    ]
    own = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "REFITD_TOKEN": TOKEN}
    environment = os.environ | own | variables
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)
    assert "trained 2" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]


def only_refitd_wrote(server: VllmServer) -> None:
    log = server.log.read_text(errors="replace")
    assert log.count("POST /v1/completions") >= 4  # two steps' rollouts, and two answers to the test
    for route in ("start_weight_update", "update_weights", "init_weight_transfer_engine"):
        assert f"POST /{route}" not in log
