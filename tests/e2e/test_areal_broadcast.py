"""A trainer that broadcasts as AReaL does, the front in the places of two engines, and what the engines serve."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file

from support.areal_trainer import TrainerRank, announced, named, trainer_rank
from support.front import FrontServer
from support.jobs import PROMPT, RUN, running, served_by
from support.servers import EmbeddedServer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


class ArealCalls:
    """AReaL's calls to all of its engines at the same time."""

    def __init__(self, fronts: list[str]) -> None:
        self._fronts = fronts
        self._threads = ThreadPoolExecutor()

    def post(self, path: str, *bodies: Mapping[str, Any]) -> list[httpx.Response]:
        """One body for all, or one for each."""
        urls = [f"{front}{path}" for front in self._fronts]
        each = bodies if len(bodies) == len(urls) else [*bodies, {}][:1] * len(urls)
        return list(self._threads.map(lambda url, body: httpx.post(url, json=body, timeout=120), urls, each))

    def make(self, trainer: TrainerRank) -> None:
        """The group of the trainer and the engines."""
        trainer.make(len(self._fronts))
        bodies = [announced(trainer.port, 1 + each, len(self._fronts)) for each in range(len(self._fronts))]
        assert [reply.status_code for reply in self.post("/init_weights_update_group", *bodies)] == [200, 200]
        assert trainer.done() == ""

    def update(self, trainer: TrainerRank, tensors: Mapping[str, Any]) -> list[httpx.Response]:
        """Pause, broadcast in two buckets, and go on; the answers to the last."""
        self.post("/pause_generation")
        names = list(tensors)
        for bucket in (names[:3], names[3:]):
            part = {name: tensors[name] for name in bucket}
            trainer.send(part)
            taken = self.post("/update_weights_from_distributed", named(part))
            assert [reply.status_code for reply in taken] == [200, 200]
            assert trainer.done() == ""
        return self.post("/continue_generation")


def test_a_broadcast_is_one_version_of_two_engines_and_an_incomplete_one_is_an_error_and_none(
    models: Path, tmp_path: Path
) -> None:
    (tmp_path / "second").mkdir()
    with (
        EmbeddedServer(tmp_path, models / "model_a") as one,
        EmbeddedServer(tmp_path / "second", models / "model_a") as two,
        running(tmp_path, one, "--engine", two.url) as job,
        FrontServer(tmp_path, job, "--engine", f"{one.url}=0", "--engine", f"{two.url}=0") as server,
        trainer_rank() as trainer,
    ):
        fronts = [server.address_of(engine.url) for engine in (one, two)]
        areal = ArealCalls(fronts)
        before = [served_by(engine) for engine in (one, two)]
        tensors = {
            name: each for path in (models / "model_b").glob("*.safetensors") for name, each in load_file(path).items()
        }
        lacking = dict(list(tensors.items())[:-1])
        areal.make(trainer)

        answers = areal.update(trainer, lacking)
        assert [reply.status_code for reply in answers] == [400, 400]
        assert all(next(reversed(tensors)) in reply.json()["message"] for reply in answers), answers[0].text
        assert [served_by(engine) for engine in (one, two)] == before
        prompt = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
        assert [reply.status_code for reply in areal.post("/generate", prompt)] == [200, 200]

        assert [reply.status_code for reply in areal.update(trainer, tensors)] == [200, 200]
        now = [served_by(engine) for engine in (one, two)]
        assert {(each.path, each.label) for each in now} == {(str(job.root / RUN / "v000002"), "2")}
        assert now[0].answer == now[1].answer != before[0].answer

        answers = areal.update(trainer, lacking)  # and now the front knows what the version before had
        assert "is missing" in answers[0].json()["message"]
        assert [served_by(engine) for engine in (one, two)] == now
