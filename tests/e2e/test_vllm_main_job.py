"""The main job with a real vLLM, stock and with refitd inside: what a trainer publishes is served, and bad is not."""

import asyncio
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from refitd_client.contract.states import EngineState
from support.bad_checkpoints import place
from support.jobs import RUN, running
from support.servers import KIT as SGLANG_KIT
from support.vllm import WIDTH, PluggedVllm, VllmServer, VllmSubject

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm-models")
    for script in (["make-models", str(folder), str(WIDTH)], ["make-bad", str(folder)]):
        subprocess.run([sys.executable, str(SGLANG_KIT / script[0]), *script[1:]], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module", params=["stock", "with-refitd"])
def engine(
    request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Generator[tuple[VllmServer, Path]]:
    """A server, and a root of its own."""
    root = tmp_path_factory.mktemp("root")
    (root / ".refitd").mkdir()
    folder, model = tmp_path_factory.mktemp("vllm"), models / "model_a"
    with ExitStack() as stack:
        plugged = request.param == "with-refitd"
        made = PluggedVllm(folder, model, root=root) if plugged else VllmServer(folder, model)
        yield stack.enter_context(made), root


def test_what_a_trainer_publishes_is_served_and_stays_so_over_a_restart_of_the_service(
    engine: tuple[Any, Path], models: Path, tmp_path: Path
) -> None:
    server, root = engine
    subject = VllmSubject(server, models)

    def answer() -> list[int]:
        return asyncio.run(subject.answer())

    with running(tmp_path, server, root=root) as job:
        answers: list[list[int]] = []
        for step, model in enumerate(["model_b", "model_a", "model_b"], start=1):
            job.serve(models / model, step)
            answers.append(answer())
        assert answers[0] == answers[2] != answers[1]
        seen = job.engine_now
        assert (seen.plugin is not None) is isinstance(server, PluggedVllm)
        assert seen.last_attempt is not None
        assert ("prepare" in seen.last_attempt.timings) is isinstance(server, PluggedVllm)
        for step, model in enumerate(("bad_missing", "bad_trunc", "b_only_lm_head"), start=4):
            assert job.rejected(place(root, RUN, step, models / model, manifest=True), step)
        assert answer() == answers[2]
        job.refitd.kill()
        mark = job.now
        job.refitd.restart()
        # Nothing is loaded again: the label names the version, and what is in memory was held against the record.
        job.until(lambda event: event.subject == seen.id and event.text.startswith("IN_SYNC: serves"), after=mark)
        assert job.engine_now.last_attempt == seen.last_attempt
        assert job.engine_now.state is EngineState.IN_SYNC
        assert answer() == answers[2]
        job.serve(models / "model_a", 7)
        assert answer() == answers[1]
