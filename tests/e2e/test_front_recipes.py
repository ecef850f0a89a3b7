"""The trainers of docs/trainers.md that have their engines' addresses in a setting: their calls, at the front."""

import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import torch

from support.areal_trainer import trainer_rank
from support.front import NCCL_STAND_IN, FrontServer, GroupFront
from support.front_clients import CallRefusedError, SlimeEngines, VerlServer
from support.jobs import PATIENCE, Job, running, served_by
from support.servers import VLLM_VENV, EmbeddedServer
from support.sglang_trainer import tensors_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


class OpenEngine(EmbeddedServer):
    """Without keys: slime sends none."""

    def __init__(self, folder: Path, model: Path) -> None:
        folder.mkdir(exist_ok=True)
        super().__init__(folder, model)
        self._flags = []


class Recipe:
    """Two engines, the front's address of each, and what clean loads of the models answer."""

    def __init__(self, models: Path, folder: Path, job: Job, engines: list[OpenEngine], front: FrontServer) -> None:
        self.models, self.folder, self.job, self.engines = models, folder, job, engines
        self.addresses = [front.address_of(engine.url) for engine in engines]

    def clean(self, model: str) -> list[int]:
        with OpenEngine(self.folder / f"clean-{model}", self.models / model) as engine:
            return served_by(engine).answer

    @property
    def served(self) -> list[tuple[str, list[int]]]:
        return [(seen.label, seen.answer) for seen in map(served_by, self.engines)]


@pytest.fixture
def recipe(models: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Generator[Recipe]:
    kind: type[FrontServer] = getattr(request, "param", FrontServer)
    (tmp_path / "fileroot").mkdir()
    with (
        OpenEngine(tmp_path / "one", models / "model_a") as one,
        OpenEngine(tmp_path / "two", models / "model_a") as two,
        running(tmp_path, one, "--engine", two.url) as job,
        kind(tmp_path, job, "--engine", f"{one.url}=0", "--engine", f"{two.url}=0", has_keys=False) as front,
    ):
        yield Recipe(models, tmp_path, job, [one, two], front)


def test_slime_attaches_to_the_fronts_addresses_and_updates_its_engines_by_disk_and_by_the_broadcasts_of_two_stages(
    recipe: Recipe,
) -> None:
    slime = SlimeEngines(recipe.addresses)
    gpus = slime.attach()
    assert gpus == [1, 1]
    folder = Path(shutil.copytree(recipe.models / "model_b", recipe.folder / "fileroot/weight_v000001"))
    slime.update_from_disk(folder, 1)
    shutil.rmtree(folder)  # without --update-weight-disk-keep-files
    expected = recipe.clean("model_b")
    assert recipe.served == [("1", expected)] * 2

    weights = tensors_of(recipe.models / "model_a")
    names = list(weights)
    shares = [{name: weights[name] for name in part} for part in (names[: len(names) // 2], names[len(names) // 2 :])]
    with ExitStack() as stack:
        ranks = [stack.enter_context(trainer_rank()) for _ in shares]
        slime.connect(ranks, gpus)
        slime.update_from_distributed(ranks, shares, 2)
        first = recipe.clean("model_a")
        assert recipe.served == [("2", first)] * 2
        assert first != expected

        broken = {**shares[1], names[-1]: torch.full_like(weights[names[-1]], torch.nan)}
        with pytest.raises(CallRefusedError, match="NaN"):
            slime.update_from_distributed(ranks, [shares[0], broken], 3)
        assert recipe.served == [("2", first)] * 2
        slime.update_from_distributed(ranks, shares, 4)
    assert recipe.served == [("4", first)] * 2


def test_what_verl_sends_its_servers_is_refused_with_what_to_use_and_no_engine_hears_of_it(recipe: Recipe) -> None:
    before = recipe.served
    verl = VerlServer(recipe.addresses[0])
    with pytest.raises(CallRefusedError, match="not carried through"):
        verl.release()
    with pytest.raises(CallRefusedError, match="pickle"):
        verl.update(tensors_of(recipe.models / "model_b"))
    assert recipe.served == before
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1}}
    assert httpx.post(f"{recipe.addresses[0]}/generate", json=body, timeout=PATIENCE).status_code == 200


@pytest.mark.vllm
@pytest.mark.parametrize("recipe", [GroupFront], indirect=True)
def test_a_trainer_that_calls_vllms_methods_on_each_engine_as_open_instruct_does_makes_one_version_of_them(
    recipe: Recipe,
) -> None:
    program = Path(__file__).resolve().parents[1] / "vllm/handles_trainer.py"
    python = Path(VLLM_VENV or "").absolute() / "bin/python"
    command = [str(python), "-W", "ignore", str(program), str(recipe.models / "model_b"), *recipe.addresses]
    environment = os.environ | {"PYTHONPATH": str(NCCL_STAND_IN)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert "SENT" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    assert [version.step for version in recipe.job.client.versions().items] == [1]
    assert recipe.served == [("1", recipe.clean("model_b"))] * 2
