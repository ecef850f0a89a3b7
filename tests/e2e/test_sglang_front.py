"""SGLang's calls at the front of a real SGLang and a second engine of the run: not an imitation."""

import shutil
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from refitd_client.contract.states import EngineState
from support.front import FrontServer
from support.jobs import Job, running, served_by
from support.servers import EmbeddedServer, EngineServer, SglangServer
from support.sglang_trainer import sglang_trainer, tensors_of

pytestmark = [pytest.mark.sglang, pytest.mark.e2e, pytest.mark.timeout(600)]
LAST = "model.norm.weight"
PAIR = ("model_a", "model_b")


@dataclass
class Facing:
    """A front, and what each of its engines answers after a clean load of each model by its files."""

    job: Job
    engines: list[EngineServer]
    front: FrontServer
    expected: dict[str, list[list[int]]]

    @property
    def answers(self) -> list[list[int]]:
        """Each engine's own, past the front: one that is paused gives none."""
        return [served_by(engine).answer for engine in self.engines]

    @property
    def is_well(self) -> bool:
        engines = self.job.client.engines().items
        return all(engine.state is EngineState.IN_SYNC and not engine.paused for engine in engines)


@pytest.fixture
def facing(sglang: SglangServer, models: Path, tmp_path: Path) -> Generator[Facing]:
    if not sglang.is_running:
        sglang.restart()
    with (
        EmbeddedServer(tmp_path, models / "model_a") as second,
        running(tmp_path, sglang, "--engine", second.url) as job,
    ):
        engines: list[EngineServer] = [sglang, second]
        expected: dict[str, list[list[int]]] = {}
        for step, name in enumerate(PAIR, start=1):
            job.serve(models / name, step)
            expected[name] = [served_by(engine).answer for engine in engines]
        assert all(a != b for a, b in zip(expected["model_a"], expected["model_b"], strict=True))
        with FrontServer(tmp_path, job) as front:
            yield Facing(job, engines, front, expected)


def test_a_real_sglang_answers_after_each_of_its_trainers_ways_as_after_a_clean_load_of_the_same_weights(
    models: Path, tmp_path: Path, facing: Facing
) -> None:
    weights = {name: tensors_of(models / name) for name in PAIR}
    with sglang_trainer(facing.front.url) as trainer:
        assert trainer.connect() == ""

        def saved(label: str, name: str) -> Path:
            return Path(shutil.copytree(models / name, tmp_path / f"fileroot/weight_v{int(label):06d}"))

        ways: list[Callable[[str, str], str]] = [
            lambda label, name: trainer.by_disk(saved(label, name), label),
            lambda label, name: trainer.as_slime(weights[name], label),
            lambda label, name: trainer.as_miles(weights[name], label),
            lambda label, name: trainer.as_sglang(weights[name], label),
            lambda label, name: trainer.by_pull(saved(label, name).parent, int(label)),
        ]
        for number, way in enumerate(ways, start=1):
            for label, name in ((f"{number}0", "model_a"), (f"{number}5", "model_b")):
                assert way(label, name) == ""
                assert facing.answers == facing.expected[name], (number, name)
                assert [served_by(engine).label for engine in facing.engines] == [label, label]
        assert trainer.generates
    assert facing.is_well


def test_a_nan_a_short_broadcast_and_a_trainer_that_is_killed_leave_a_real_sglang_as_it_was_and_the_next_update_works(
    models: Path, facing: Facing
) -> None:
    good = tensors_of(models / "model_a")
    nan = {**good, LAST: torch.full_like(good[LAST], torch.nan)}
    short = {**good, LAST: good[LAST][:-1].clone()}
    before = facing.expected["model_b"]
    with sglang_trainer(facing.front.url) as trainer:
        assert trainer.connect() == ""
        assert "NaN" in trainer.as_miles(nan, "10")
        assert (facing.answers, facing.is_well) == (before, True)
        assert "less was sent of tensor" in trainer.as_slime(short, "11", good)
        assert "less was sent of tensor" in trainer.post("continue_generation")
        assert (facing.answers, facing.is_well) == (before, True)
    with sglang_trainer(facing.front.url) as trainer, ThreadPoolExecutor() as threads:
        assert trainer.connect() == ""
        trainer.pause()
        bucket = dict(list(good.items())[:3])
        told = threads.submit(trainer.announce, bucket, "12")
        trainer.rank.send(dict(list(bucket.items())[:1]))
        assert trainer.rank.done() == ""
        trainer.rank.kill()
        assert "has not arrived" in told.result()
        assert (facing.answers, facing.is_well) == (before, True)
    with sglang_trainer(facing.front.url) as trainer:
        assert trainer.connect() == ""
        assert trainer.as_slime(good, "13") == ""
        assert (facing.answers, facing.is_well) == (facing.expected["model_a"], True)
        assert trainer.generates
