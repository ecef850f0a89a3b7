"""Weights sent over a Gloo group to a real SGLang, by the service, from memory that only the trainer can read."""

from collections.abc import Generator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from refitd_client import PublishOptions, WeightPublisher
from refitd_client.contract.states import EngineState, VersionState
from support.hubs import until
from support.jobs import TOKEN, Job, running, served_by
from support.plugged import PluggedSglang

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

RUN = "sent/over"


@pytest.fixture
def job(sglang_plugged: PluggedSglang, service: Path) -> Generator[Job]:
    with running(service, sglang_plugged, "--run", RUN, root=sglang_plugged.root, run=RUN) as job:
        yield job


def test_what_a_trainer_sends_is_served_before_its_files_are_there_and_stays_when_they_are(
    sglang_plugged: PluggedSglang, models: Path, job: Job
) -> None:
    a, b = (load_file(models / name / "model.safetensors") for name in ("model_a", "model_b"))
    with WeightPublisher(job.root, RUN, job.refitd.url, options=PublishOptions(token=TOKEN)) as publisher:
        answers = []
        for step, weights in ((1, b), (2, a)):
            publisher.publish(weights, step=step).wait(120)
            answers.append(served_by(sglang_plugged).answer)
        for step, weights in ((3, b), (4, a), (5, b)):
            publication = publisher.publish(weights, step=step, transport="gloo")
            assert publication.handed is not None
            assert (publication.handed.engines, publication.handed.reason) == ((job.engine_now.id,), None)
            assert publication.handed.sent is not None
            served = served_by(sglang_plugged)
            assert (served.label, served.answer) == (str(step), answers[(step - 3) % 2])
            publication.wait(120, "sealed")
        assert answers[0] != answers[1]
    sealed = job.client.version("sent~over~v000005")
    assert (sealed.state, sealed.metadata["transport"]) == (VersionState.SEALED, "gloo")


def test_versions_in_memory_alone_outlive_their_trainer_and_an_engine_that_restarts_goes_back_to_one_with_files(
    sglang_plugged: PluggedSglang, models: Path, job: Job
) -> None:
    a, b = (load_file(models / name / "model.safetensors") for name in ("model_a", "model_b"))
    with WeightPublisher(
        job.root, RUN, job.refitd.url, options=PublishOptions(token=TOKEN, durable="every=100")
    ) as publisher:
        first = publisher.publish(b, step=30, transport="gloo")
        first.wait(120)
        first.wait(120, "sealed")
        answers = [served_by(sglang_plugged).answer]
        for step, weights in ((31, a), (32, b), (33, a)):  # each from one that cannot be put back
            publication = publisher.publish(weights, step=step, transport="gloo")
            assert publication.handed is not None
            assert (publication.handed.engines, publication.handed.reason) == ((job.engine_now.id,), None)
            assert publication.committed(30).in_memory
            assert not publication.path.exists()
            answers.append(served_by(sglang_plugged).answer)
    assert [answer == answers[0] for answer in answers] == [True, False, True, False]
    assert answers[1] == answers[3]
    last = "sent~over~v000033"
    job.refitd.kill()  # and the trainer has gone
    job.refitd.start()
    until(lambda: job.engine_now.state is EngineState.IN_SYNC, "the engine is proved to be where it was")
    assert (job.engine_now.version, job.engine_now.in_memory) == (last, True)
    served = served_by(sglang_plugged)
    assert (served.label, served.answer) == ("33", answers[3])
    assert any("sent~over~v000030" in sentence for sentence in job.client.explain(last).sentences)
    sglang_plugged.restart()
    until(lambda: job.engine_now.version == "sent~over~v000030", "the engine has the version with files")
    served = served_by(sglang_plugged)
    assert (served.label, served.answer, job.engine_now.in_memory) == ("30", answers[0], False)
