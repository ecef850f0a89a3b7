"""Versions sent over a Gloo group to a real SGLang that has no refitd inside, by its own endpoints."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from refitd_client import WeightPublisher
from support.jobs import RUN, TOKEN, running, served_by
from support.servers import SglangServer

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]


def test_what_a_trainer_sends_is_proved_and_served_before_its_files_are_there(
    sglang: SglangServer, models: Path, tmp_path: Path
) -> None:
    a, b = (load_file(models / name / "model.safetensors") for name in ("model_a", "model_b"))
    with (
        running(tmp_path, sglang, "--sglang-stock-transfers") as job,
        WeightPublisher(job.root, RUN, job.refitd.url, token=TOKEN) as publisher,
    ):
        answers = []
        for step, weights in ((1, b), (2, a)):
            publisher.publish(weights, step=step).wait(120)
            answers.append(served_by(sglang).answer)
        for step, weights in ((3, b), (4, a), (5, b)):
            publication = publisher.publish(weights, step=step, transport="gloo")
            assert publication.handed is not None
            assert (publication.handed.engines, publication.handed.reason) == ((job.engine_now.id,), None)
            served = served_by(sglang)
            assert (served.label, served.answer) == (str(step), answers[(step - 3) % 2])
            print(publication.handed, job.engine_now)
            publication.wait(120, "sealed")
        assert answers[0] != answers[1]
