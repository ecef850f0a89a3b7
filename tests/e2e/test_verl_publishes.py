"""The backend for verl with a real service and a real engine: verl's own part is tried by `make trainers`."""

import asyncio
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from refitd_client import WaitTimeoutError
from support.jobs import PATIENCE, RUN, TOKEN, Job, running, served_by
from support.servers import EmbeddedServer
from support.verl_backend import backend

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


class OpenServer(EmbeddedServer):
    """An engine without keys, as verl starts its servers."""

    def __init__(self, folder: Path, model: Path) -> None:
        super().__init__(folder, model)
        self._flags = []


@pytest.fixture
def job(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Job]:
    """A service that was named no engine, and an engine that verl has started."""
    flags = ("--base-model", str(models / "model_a"))
    with (
        OpenServer(tmp_path, models / "model_a") as engine,
        running(tmp_path, engine, *flags, named=False) as job,
    ):
        monkeypatch.setattr(backend(), "rollout_servers", lambda: {"sglang_server_0_0": engine.url})
        yield job


def backend_of(job: Job, **more: Any) -> Any:
    module = sys.modules["refitd_client.trainers.verl"]
    place = {"root": job.root, "run": RUN, "service_url": job.refitd.url, "token": TOKEN}
    return module.RefitCheckpointEngine(1 << 20, True, wait=PATIENCE, **place, **more)


def update(engine: Any, weights: dict[str, torch.Tensor], step: int) -> None:
    """The part of verl's update that rank 0 of the actor has."""
    engine.prepare()
    asyncio.run(engine.send_weights(iter(weights.items()), global_steps=step))


def test_a_server_that_is_late_is_named_and_the_step_can_be_sent_again(models: Path, job: Job) -> None:
    engine = backend_of(job)
    weights = load_file(models / "model_b/model.safetensors")
    update(engine, weights, 0)
    engine._wait = 0.5
    with job.engine.frozen(), pytest.raises(WaitTimeoutError, match=r"verl\.sglang_server_0_0"):
        update(engine, weights, 1)
    engine._wait = PATIENCE
    update(engine, weights, 1)
    engine.close()
    assert served_by(job.engine).label == "1"
