"""kill -9 before, during and after each call of an update of a real vLLM: the service that is started next mends it.

On one rank: what the service sends is the same on several. With refitd inside only around what the extension does:
`test_update_crash.py` has every point.
"""

import asyncio
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest
from mini_stage import VLLM_CALLS, VLLM_LOAD
from nursery import PATIENCE, Nursery
from update_stage import RUN, Calls, Remains, Stage, mended_since

from support import points
from support.servers import VLLM_VENV
from support.vllm import OneVllm, VllmSubject

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(VLLM_VENV is None, reason="REFITD_VLLM_VENV names no vLLM: make vllm"),
]

INSIDE = ["heard plugin prepare", f"sent {VLLM_LOAD}", f"heard {VLLM_LOAD}"]


@pytest.fixture(scope="session", params=["vllm", "vllm-plugged"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


class VllmStage(Stage):
    """A vLLM, a root, and services that die on it."""

    update = Calls(VLLM_CALLS, VLLM_LOAD)
    subject: VllmSubject

    @property
    def points(self) -> list[str]:
        """Where services die on it."""
        if self.subject.root is not None:
            return INSIDE
        return list(points.taken(each for each in self.update.points if "POST" in each))

    @property
    def settings(self) -> dict[str, Any]:
        """Of a service that leaves alone what other tests have put into the root."""
        return super().settings | {"run": RUN}

    def check_engine(self) -> None:
        """It serves the version, by what it says and by what it answers, and is not paused."""
        info = self.http.get(f"{self.engine.url}/weight_info").json()
        paused = self.http.get(f"{self.engine.url}/is_paused").json()
        assert (info["weight_version"], paused["is_paused"]) == (str(self.step), False)
        assert asyncio.run(self.subject.answer()) == self.answers[self.step % len(self.models)]


@pytest.fixture
def stage(kind: str, one_vllm: OneVllm, vllm_models: Path, tmp_path: Path) -> Generator[VllmStage]:
    server = one_vllm.of(kind)
    models = [vllm_models / name for name in ("model_a", "model_b")]
    with httpx.Client(timeout=PATIENCE, trust_env=False) as http:
        stage = VllmStage(tmp_path, server, models, [], http)
        stage.subject = one_vllm.subject(kind)
        stage.root = stage.subject.root or stage.root
        stage.answers = asyncio.run(_answers(stage.subject))
        shutil.rmtree(stage.root / RUN, ignore_errors=True)  # of this test's first try, where this is the second
        yield stage


async def _answers(subject: VllmSubject) -> list[list[int]]:
    answers: list[list[int]] = []
    for model in ("model_a", "model_b"):
        await subject.refit(model, "0", repairs=True)
        answers.append(await subject.answer())
    await subject.engine.aclose()
    return answers


@pytest.mark.points
def test_kill_9_at_every_call_of_an_update_of_a_vllm(stage: VllmStage) -> None:
    died: list[str] = []
    with Nursery(stage.folder, stage.settings) as nursery:
        for point in stage.points:
            service = nursery.bring_up(die_on=point)
            if not died:
                stage.publish()
                assert stage.announce(service)
            stage.check_whole(service)
            nursery.arm(service)
            version = stage.publish()
            assert not stage.announce(service) or not stage.is_served(service), f"{point} does not happen"
            nursery.bury()
            died.append(point)
            remains = Remains.of(stage.state)
            remains.check(service.effects, version, stage.update)
            service = nursery.bring_up()
            assert stage.announce(service)
            stage.check_whole(service)
            assert mended_since(stage.state, remains.last_event) == bool(remains.open), point
            now = Remains.of(stage.state)
            assert not remains.open or now.loads > remains.loads, "mended without a load"
            nursery.stop(service)
    print(f"died at {', '.join(died)}")
