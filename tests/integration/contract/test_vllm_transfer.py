"""Weights sent over Gloo to a real vLLM with refitd inside: on one rank, which reloads, and on two, in place."""

import asyncio
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from refitd_client import PublishOptions, WeightPublisher
from refitd_client.contract.states import EngineState, VersionState
from refitd_client.publish.publication import Publication
from refitd_client.transport import child
from refitd_client.ways import Transport
from support import rogue_sender
from support.inside import in_process
from support.jobs import TOKEN, Job, running
from support.servers import VLLM_VENV
from support.vllm import OneVllm, PluggedVllm, VllmSubject

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(VLLM_VENV is None, reason="REFITD_VLLM_VENV names no vLLM: make vllm"),
]

RUN = "sent/to/vllm"
SECONDS = 120.0
Weights = dict[str, torch.Tensor]


class SendingJob:
    """A trainer, a service and the engine. Each publication has the other weights than the one before."""

    def __init__(self, job: Job, subject: VllmSubject, publisher: WeightPublisher, weights: list[Weights]) -> None:
        self.job, self.publisher, self._subject, self._weights = job, publisher, subject, weights
        self.step = 0
        self.answers: list[list[int]] = []
        for _ in weights:
            self.publish("disk").wait(SECONDS)
            self.answers.append(self._answer())
        assert self.answers[0] != self.answers[1]

    def _answer(self) -> list[int]:
        return asyncio.run(self._subject.answer())

    def publish(self, transport: Transport) -> Publication:
        self.step += 1
        return self.publisher.publish(self._weights[self.step % 2], step=self.step, transport=transport)

    def serves(self, step: int) -> None:
        """The engine says that it serves a step, and answers as after a load of its files."""
        assert asyncio.run(self._subject.label()) == str(step)
        assert self._answer() == self.answers[(step - 1) % 2]

    def goes(self) -> None:
        """A version is sent, and served before its files are there and afterwards."""
        publication = self.publish("gloo")
        assert publication.handed is not None
        assert (publication.handed.engines, publication.handed.reason) == ((self.job.engine_now.id,), None)
        assert publication.handed.sent is not None
        self.serves(self.step)
        publication.wait(SECONDS, "sealed")
        self.serves(self.step)
        version = self.job.client.version(publication.version_id)
        assert (version.state, version.metadata["transport"]) == (VersionState.SEALED, "gloo")


@pytest.fixture(scope="session", params=["vllm-plugged", "vllm-plugged-two-ranks"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def sending(
    kind: str, one_vllm: OneVllm, vllm_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Generator[SendingJob]:
    subject = one_vllm.subject(kind)
    assert isinstance(subject.server, PluggedVllm)
    monkeypatch.setattr(child, "PROGRAM", rogue_sender.PROGRAM)
    root, run = subject.server.root, f"{RUN}/{tmp_path.name}"
    weights = [load_file(vllm_models / name / "model.safetensors") for name in ("model_a", "model_b")]
    with (
        running(tmp_path, subject.server, "--run", run, root=root, run=run) as job,
        WeightPublisher(root, run, job.refitd.url, options=PublishOptions(token=TOKEN)) as publisher,
    ):
        yield SendingJob(job, subject, publisher, weights)


def test_what_a_trainer_sends_is_served_before_its_files_are_there_and_a_broken_transfer_never(
    sending: SendingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sender that dies when all have joined, and one that sends other bytes: files follow, and the next is sent."""
    sending.goes()
    for fault, said in (("dies", ""), ("other", "not what the trainer announced")):
        sending.goes()
        mark = sending.job.now
        with monkeypatch.context() as faulty:
            faulty.setenv(rogue_sender.VARIABLE, fault)
            in_process(sending.publisher)._context.memory.close()  # its sender has no fault
            publication = sending.publish("gloo")
        assert publication.handed is not None
        assert publication.handed.engines == ()
        assert publication.handed.reason
        assert said in publication.handed.reason
        publication.wait(SECONDS)
        sending.serves(sending.step)
        sending.job.until(lambda event, id_=publication.version_id: event.subject == id_ and "served" in event.text)
        states = {e.data.get("state") for e in sending.job.events if e.seq > mark and e.kind == "engine"}
        assert EngineState.TAINTED not in states
        in_process(sending.publisher)._context.memory.close()
    sending.goes()
