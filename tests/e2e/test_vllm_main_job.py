"""The main job with a real vLLM, stock, and with refitd inside on one rank and on two: what a trainer publishes is
served, and of what is bad no engine hears."""

import asyncio
import re
from pathlib import Path

import pytest

from refitd_client.contract.naming import Order, version_id
from refitd_client.contract.states import EngineState, VersionState
from support.bad_checkpoints import REASONS, place
from support.jobs import RUN, running
from support.saved import served_and_put_back
from support.vllm import OneVllm, PluggedVllm, VllmSubject

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="session", params=["vllm", "vllm-plugged", "vllm-plugged-two-ranks"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def test_what_a_trainer_publishes_is_served_what_is_bad_is_not_and_it_stays_so_over_a_restart_of_the_service(
    kind: str, one_vllm: OneVllm, vllm_models: Path, tmp_path: Path
) -> None:
    server, models = one_vllm.of(kind), vllm_models
    subject = VllmSubject(server, models)
    inside = isinstance(server, PluggedVllm)

    def answer() -> list[int]:
        return asyncio.run(subject.answer())

    with running(tmp_path, server, "--run", RUN, root=server.root if inside else None) as job:
        answers: list[list[int]] = []
        for step, model in enumerate(["model_b", "model_a", "model_b"], start=1):
            job.serve(models / model, step)
            answers.append(answer())
        assert answers[0] == answers[2] != answers[1]
        seen = job.engine_now
        assert (seen.plugin is not None) is inside
        assert seen.last_attempt is not None
        assert ("prepare" in seen.last_attempt.timings) is inside
        for step, (variant, reason) in enumerate(REASONS.items(), start=4):
            place(job.root, RUN, step, models / variant, manifest=True)
            id_ = version_id(RUN, Order(1, step))
            job.until(lambda event, id_=id_: event.subject == id_ and event.text.startswith("rejected"))
            version = job.client.version(id_)
            assert version.state is VersionState.REJECTED
            assert re.search(reason, version.reason or ""), version.reason
        assert job.engine_now.last_attempt == seen.last_attempt
        assert answer() == answers[2]
        job.refitd.kill()
        mark = job.now
        job.refitd.restart()
        # Nothing is loaded again: the label names the version, and what is in memory was held against the record.
        job.until(lambda event: event.subject == seen.id and event.text.startswith("IN_SYNC: serves"), after=mark)
        assert job.engine_now.last_attempt == seen.last_attempt
        assert job.engine_now.state is EngineState.IN_SYNC
        assert answer() == answers[2]
        job.serve(models / "model_a", 4 + len(REASONS))
        assert answer() == answers[1]


def test_a_checkpoint_of_save_pretrained_is_prepared_proved_and_put_back_by_refitd_inside(
    kind: str, one_vllm: OneVllm, vllm_models: Path, tmp_path: Path
) -> None:
    server = one_vllm.of(kind)
    if not isinstance(server, PluggedVllm):
        return  # a stock server is asked for what it loads by the contract's tests
    subject = VllmSubject(server, vllm_models)
    run = "saved/checkpoints"
    with running(tmp_path, server, "--run", run, root=server.root, run=run) as job:
        served_and_put_back(
            job, vllm_models, lambda: asyncio.run(subject.answer()), proved=kind == "vllm-plugged-two-ranks"
        )  # on one rank layers are repacked
