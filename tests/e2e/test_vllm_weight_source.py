"""vLLM's own trainer classes, unchanged, with refitd in the place of its transfers: not an imitation."""

import asyncio
import json
import os
import re
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

from refitd_client.contract.states import EngineState
from support import published
from support.jobs import RUN, TOKEN, running
from support.servers import VLLM_VENV
from support.vllm import REPOSITORY, OneVllm, VllmSubject
from support.weight_sources import read

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.timeout(600)]
TRAINER = str(REPOSITORY / "tests/vllm/source_trainer.py")


@pytest.fixture(scope="session")
def kind() -> str:
    return "vllm"


def said_by(*words: str) -> Any:
    """Run the trainer in vLLM's environment; what it says."""
    own = {"PYTHONPATH": str(REPOSITORY / "client"), "OWN_PACKAGES": sysconfig.get_paths()["purelib"]}
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONWARNINGS": "ignore"}
    python = str(Path(VLLM_VENV or "").absolute() / "bin/python")
    done = subprocess.run([python, *words], capture_output=True, text=True, check=False, env=os.environ | own | quiet)
    found = [line.partition("SAID ")[2] for line in done.stdout.splitlines() if "SAID " in line]
    assert found, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(found[0])


def test_a_module_source_of_two_ranks_of_fsdp2_is_published_tensor_for_tensor_and_one_of_parts_is_refused(
    vllm_models: Path, tmp_path: Path
) -> None:
    model = vllm_models / "model_b"
    launched = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    refused, version = said_by(*launched, TRAINER, "ranks", str(tmp_path), "run", str(model))
    assert version == "run~v000001"
    assert re.match(r"InvalidWeightsError: rank \d: tensor \S+ is yielded as .* sources yield whole tensors", refused)
    published.check_by_blocks(tmp_path / "run/v000001")
    found, trained = read(tmp_path / "run/v000001"), read(model)
    assert found.keys() == trained.keys()
    assert all(torch.equal(found[name], each) for name, each in trained.items())


def test_a_trainer_engine_of_vllms_and_its_module_source_update_a_vllm_and_a_nan_is_an_error_that_changes_nothing(
    one_vllm: OneVllm, vllm_models: Path, tmp_path: Path
) -> None:
    server = one_vllm.of("vllm")
    subject = VllmSubject(server, vllm_models)
    with running(tmp_path, server, "--run", RUN) as job:
        clean: list[list[int]] = []
        for step, model in enumerate(["model_b", "model_a"], start=1):
            job.serve(vllm_models / model, step)
            clean.append(asyncio.run(subject.answer()))
        assert clean[0] != clean[1]
        updates = [("model_b", "3"), ("bad_nan", "bad"), ("model_a", "best"), ("model_b", "3")]
        words = [word for model, label in updates for word in (str(vllm_models / model), label)]
        place = str(job.root), RUN, job.refitd.url, TOKEN, str(vllm_models / "model_b")
        first, bad, last, twice = said_by(TRAINER, "serve", *place, *words)
        assert (first, last) == ("", "")
        assert bad.startswith("VersionRejectedError: ")
        assert "NaN" in bad
        assert twice.startswith("LabelRefusedError: weight_version 3 is not above 5")
        assert asyncio.run(subject.answer()) == clean[0]
        labels = {each.step: each.metadata.get("weight_version") for each in job.client.versions(RUN).items}
        assert labels == {1: None, 2: None, 3: "3", 4: "bad", 5: "best", 100: None}
        seen = job.engine_now
        assert (seen.state, seen.paused, seen.version) == (EngineState.IN_SYNC, False, "exp~trial~v000100")
