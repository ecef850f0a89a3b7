"""Weights handed over from a trainer's memory to a real SGLang, by the service: the GPU's twin in shared memory."""

from collections.abc import Generator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from refitd_client import WeightPublisher
from refitd_client.contract.states import VersionState
from refitd_client.handover.shared import SharedTensors
from support.jobs import TOKEN, Job, running, served_by
from support.lending import fill, shared
from support.plugged import PluggedSglang

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

RUN = "handed/over"


@pytest.fixture
def job(sglang_plugged: PluggedSglang, service: Path) -> Generator[Job]:
    with running(service, sglang_plugged, "--run", RUN, root=sglang_plugged.root, run=RUN) as job:
        yield job


@pytest.fixture
def trainer(models: Path, tmp_path: Path) -> Generator[SharedTensors]:
    made = shared(load_file(models / "model_a" / "model.safetensors"), tmp_path)
    yield made
    made.close()


def test_what_a_trainer_lends_is_served_before_its_files_are_there_and_stays_when_they_are(
    sglang_plugged: PluggedSglang, models: Path, job: Job, trainer: SharedTensors
) -> None:
    b = load_file(models / "model_b" / "model.safetensors")
    with WeightPublisher(job.root, RUN, job.refitd.url, token=TOKEN) as publisher:
        publisher.publish(models / "model_b", step=1).wait(120)
        answers = [served_by(sglang_plugged).answer]
        publisher.publish(trainer.tensors, step=2).wait(120)
        answers.append(served_by(sglang_plugged).answer)
        for step, weights in ((3, b), (4, load_file(models / "model_a" / "model.safetensors"))):
            fill(trainer, weights)
            publication = publisher.publish(trainer.tensors, step=step, handover=True)
            assert publication.handed is not None
            assert (publication.handed.engines, publication.handed.reason) == ((job.engine_now.id,), None)
            served = served_by(sglang_plugged)
            assert (served.label, served.answer) == (str(step), answers[step - 3])
            loads = job.engine_now.last_attempt
            publication.wait(120, "sealed")
            assert job.engine_now.last_attempt == loads  # it is not loaded again
        assert answers[0] != answers[1]
    sealed = job.client.version("handed~over~v000004")
    assert sealed.state is VersionState.SEALED
