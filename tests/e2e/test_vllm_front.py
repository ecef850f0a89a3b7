"""vLLM's own client of its weight transfer, at the front of a real vLLM: not an imitation."""

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from refitd_client.contract.states import EngineState
from support.front import FrontServer
from support.jobs import RUN, running
from support.servers import VLLM_VENV
from support.vllm import OneVllm, VllmSubject

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.timeout(600)]
TRAINER = Path(__file__).resolve().parents[1] / "vllm/front_trainer.py"


@pytest.fixture(scope="session")
def kind() -> str:
    return "vllm"


def test_an_unchanged_client_of_vllms_updates_a_vllm_through_the_front_and_a_nan_is_an_error_that_changes_nothing(
    one_vllm: OneVllm, vllm_models: Path, tmp_path: Path
) -> None:
    server = one_vllm.of("vllm")
    subject = VllmSubject(server, vllm_models)

    def answer() -> list[int]:
        return asyncio.run(subject.answer())

    with running(tmp_path, server, "--run", RUN) as job:
        clean: list[list[int]] = []
        for step, model in enumerate(["model_a", "model_b"], start=1):
            job.serve(vllm_models / model, step)
            clean.append(answer())
        assert clean[0] != clean[1]
        with FrontServer(tmp_path, job) as front:
            (tmp_path / "fileroot").mkdir()
            updates: list[str] = []
            for label, model in [("3", "model_a"), ("bad", "bad_nan"), ("best", "model_b")]:
                updates += [str(shutil.copytree(vllm_models / model, tmp_path / "fileroot" / label)), label]
            first, bad, last = said_by_vllms_client(front.url, *updates)
            assert (first, last) == ("", "")
            assert "NaN" in bad
        assert answer() == clean[1]
        assert job.client.version("exp~trial~v000005").metadata["weight_version"] == "best"
        seen = job.engine_now
        assert (seen.state, seen.paused, seen.version) == (EngineState.IN_SYNC, False, "exp~trial~v000005")


def said_by_vllms_client(url: str, *updates: str) -> list[str]:
    """Run the trainer; what its updates raised."""
    python = Path(VLLM_VENV or "").absolute() / "bin/python"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), "-W", "ignore", str(TRAINER), url, *updates]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    found = [line.removeprefix("SAID ") for line in done.stdout.splitlines() if line.startswith("SAID ")]
    assert found, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(found[0])
