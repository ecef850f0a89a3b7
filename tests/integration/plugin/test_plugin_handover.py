"""Weights handed over from a trainer's memory to a real SGLang, by the service: the GPU's twin in shared memory."""

import errno
import os
from collections.abc import Generator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from refitd_client import PublishOptions, StorageError, WeightPublisher
from refitd_client.contract.states import VersionState
from refitd_client.transport.memory import SharedTensors
from refitd_client.write import version_folder as staging
from support.exporting import fill, shared
from support.jobs import TOKEN, Job, running, served_by
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
    with WeightPublisher(job.root, RUN, job.refitd.url, options=PublishOptions(token=TOKEN)) as publisher:
        publisher.publish(models / "model_b", step=1).wait(120)
        answers = [served_by(sglang_plugged).answer]
        publisher.publish(trainer.tensors, step=2).wait(120)
        answers.append(served_by(sglang_plugged).answer)
        for step, weights in ((3, b), (4, load_file(models / "model_a" / "model.safetensors"))):
            fill(trainer, weights)
            publication = publisher.publish(trainer.tensors, step=step, transport="handover")
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


def test_where_the_durable_copy_fails_the_version_is_marked_so_and_the_next_one_is_durable_first(
    sglang_plugged: PluggedSglang, models: Path, job: Job, trainer: SharedTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    folders = [models / "model_a", models / "model_b"]
    with WeightPublisher(job.root, RUN, job.refitd.url, options=PublishOptions(token=TOKEN)) as publisher:
        answers = []
        for step, folder in enumerate(folders, 11):
            publisher.publish(folder, step=step).wait(120)
            answers.append(served_by(sglang_plugged).answer)
        with monkeypatch.context() as broken:
            broken.setattr(staging.Staging, "seal", refuse)
            third = publisher.publish(trainer.tensors, step=13, transport="handover")
            assert third.handed is not None
            assert third.handed.engines == (job.engine_now.id,)
            with pytest.raises(StorageError, match="Input/output error"):
                third.committed(120)
        marked = job.client.version(third.version_id)
        assert (marked.state, marked.in_memory) == (VersionState.REJECTED, True)
        assert "its files will not come" in str(marked.reason)
        assert (served_by(sglang_plugged).answer, job.engine_now.in_memory) == (answers[0], True)
        back = "a restart of an engine or a rollback leads to handed~over~v000012"
        assert any(back in sentence for sentence in job.client.explain(job.engine_now.id).sentences)

        fill(trainer, load_file(folders[1] / "model.safetensors"))
        fourth = publisher.publish(trainer.tensors, step=14, transport="handover")
        assert fourth.handed is not None
        assert (fourth.handed.engines, "these come first" in str(fourth.handed.reason)) == ((), True)
        fourth.wait(120)
        assert (served_by(sglang_plugged).answer, job.engine_now.in_memory) == (answers[1], False)
        sealed = job.until(lambda event: event.subject == fourth.version_id and "sealed" in event.text.lower())
        told = job.until(lambda event: event.text == f"UPDATING: loads {fourth.version_id}")
        assert sealed.seq < told.seq  # no engine has heard of it before

        fill(trainer, load_file(folders[0] / "model.safetensors"))
        fifth = publisher.publish(trainer.tensors, step=15, transport="handover")
        assert fifth.handed is not None
        assert fifth.handed.engines == (job.engine_now.id,)
        fifth.wait(120, "sealed")
